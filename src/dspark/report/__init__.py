"""The paper's figures of your own runs: from record files to PNG, SVG and one page."""

"""Drafters in the layouts of other projects: reading, writing, inspecting and converting them.

    formats      the table of formats; which one a folder is in; read_checkpoint, write_checkpoint
    form         what the formats share: config and tensors side by side, layer-id conventions, contradictions
    deepspec     DeepSpec's own layout, this project's native one
    speculators  speculators (vLLM): DSpark, DFlash, Eagle3
    specforge    SpecForge's DSpark export
    zlab         z-lab's DFlash
    sglang       EAGLE3 as its authors and SGLang store it
    inspection   what a folder holds, its conventions, and whether it fits a target
    conversion   one folder into another format, with a manifest

Every reader translates into DeepSpec's ``config.json`` and tensor names, every writer starts from them; in between
stands :class:`dspark.models.checkpoint.Checkpoint`.
"""

// Starts the page: theme, tabs, and the two panels.

import { $, stored } from "./api.js";
import { startChat } from "./chat.js";
import { startLive } from "./live.js";

const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  stored.set("theme", name);
  dispatchEvent(new Event("dspark-theme"));
}

function setTab(name) {
  document.body.dataset.tab = name;
  for (const one of ["chat", "live"]) {
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
    $(`tab-${one}`).tabIndex = one === name ? 0 : -1;
  }
  dispatchEvent(new Event("resize"));
}

$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
for (const name of ["chat", "live"]) {
  $(`tab-${name}`).addEventListener("click", () => setTab(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "live" : "chat";
    setTab(other);
    $(`tab-${other}`).focus();
  });
}
const asked = new URLSearchParams(location.search);
setTheme(THEMES.includes(asked.get("theme")) ? asked.get("theme") : stored.get("theme") ?? "auto");
setTab(location.hash === "#live" ? "live" : "chat");
startChat();
startLive();

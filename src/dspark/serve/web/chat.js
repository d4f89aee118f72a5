// A conversation: streamed, stoppable, with the drafts in colour. History lives in this page alone.

import { $, askForKey, events, headers, reason, stored } from "./api.js";

const history = []; // {role, content}, as it is sent
let model = null;
let running = null; // AbortController of the answer under way

export function startChat() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("prompt").addEventListener("input", grow);
  $("stop").addEventListener("click", () => running?.abort());
  addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  $("new").addEventListener("click", (event) => { event.preventDefault(); reset(); });
  for (const name of ["temperature", "most", "system"]) {
    const kept = stored.get(name);
    if (kept !== null) $(name).value = kept;
    $(name).addEventListener("input", () => { stored.set(name, $(name).value); shown(); });
  }
  for (const name of ["colours", "rejects"]) {
    const kept = stored.get(name);
    if (kept !== null) $(name).checked = kept === "true";
    $(name).addEventListener("change", () => { stored.set(name, $(name).checked); shown(); });
  }
  shown();
  if (matchMedia("(min-width: 1080px)").matches) $("prompt").focus();
}

function shown() {
  $("temperature-shown").textContent = Number($("temperature").value).toFixed(2);
  $("messages").classList.toggle("plain", !$("colours").checked);
  $("messages").classList.toggle("rejects", $("rejects").checked);
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, 176)}px`;
}

function reset() {
  running?.abort();
  history.length = 0;
  for (const old of document.querySelectorAll(".message")) old.remove();
  $("empty").hidden = false;
  $("prompt").focus();
}

function add(role, text) {
  $("empty").hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const words = document.createElement("div");
  words.className = "text";
  words.textContent = text;
  message.append(words);
  let foot = null;
  if (role === "assistant") {
    foot = document.createElement("div");
    foot.className = "foot";
    message.append(foot);
  }
  $("messages").append(message);
  follow(true);
  return { message, words, foot };
}

function follow(always = false) {
  const box = $("messages");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

async function servedModel() {
  if (model) return model;
  let reply = await fetch("/v1/models", { headers: headers() });
  if (reply.status === 401) {
    await askForKey();
    reply = await fetch("/v1/models", { headers: headers() });
  }
  if (!reply.ok) throw new Error(await reason(reply));
  model = (await reply.json()).data[0].id;
  return model;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  grow();
  add("user", text);
  history.push({ role: "user", content: text });
  const view = add("assistant", "");
  running = new AbortController();
  busy(true);
  view.words.classList.add("waiting");
  const said = { text: "", started: performance.now(), first: null, rounds: 0, accepted: 0, usage: null };
  let failed = null;
  try {
    await answer(view, said, running.signal);
  } catch (error) {
    failed = error.name === "AbortError" ? "stopped" : said.text ? `broke off: ${error.message}` : error.message;
  }
  view.words.classList.remove("waiting");
  running = null;
  busy(false);
  finish(view, said, failed);
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  (on ? $("stop") : $("prompt")).focus({ preventScroll: true });
}

async function answer(view, said, signal) {
  const system = $("system").value.trim();
  const body = {
    model: await servedModel(),
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true, include_drafts: true },
  };
  const most = Number.parseInt($("most").value, 10);
  if (most > 0) body.max_tokens = most;
  let reply = await post(body, signal);
  if (reply.status === 400 && body.max_tokens) { // the context may hold less than is asked for: take what there is
    const words = await reply.clone().json().catch(() => ({}));
    if (words.error?.code === "context_length_exceeded") {
      delete body.max_tokens;
      reply = await post(body, signal);
    }
  }
  if (!reply.ok) throw new Error(await reason(reply));
  for await (const { data } of events(reply)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) said.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (choice) show(view, said, choice.delta?.content ?? "", chunk.drafts);
    if (choice?.finish_reason) said.reason = choice.finish_reason;
  }
  throw new Error("the connection broke off");
}

function post(body, signal) {
  return fetch("/v1/chat/completions", {
    method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal,
  });
}

function show(view, said, text, drafts) {
  if (text && said.first === null) said.first = performance.now();
  said.text += text;
  if (drafts?.verified) { said.rounds += 1; said.accepted += drafts.accepted; }
  const pieces = drafts?.pieces ?? [];
  if (pieces.map((piece) => piece[1]).join("") === text) for (const [kind, piece] of pieces) put(view.words, kind, piece);
  else put(view.words, "", text);
  if (drafts?.rejected.length) put(view.words, "rejected", drafts.rejected.join(""));
  follow();
}

/** Append text of one origin; neighbours of the same origin share an element. */
function put(line, kind, text) {
  let last = line.lastElementChild;
  if (last?.className !== kind) {
    last = document.createElement("span");
    last.className = kind;
    if (kind === "rejected") last.title = "rejected drafts";
    line.append(last);
  }
  last.append(text);
}

function finish(view, said, failed) {
  if (said.text) history.push({ role: "assistant", content: said.text });
  else history.pop(); // no answer: the next attempt does not repeat the question
  const parts = [];
  if (failed) parts.push(failed);
  if (said.reason === "length") parts.push("cut at the most tokens");
  if (said.usage && said.first !== null) {
    const seconds = (performance.now() - said.first) / 1000;
    const tokens = said.usage.completion_tokens;
    parts.push(`${tokens} tokens`);
    if (seconds > 0 && tokens > 1) parts.push(`${((tokens - 1) / seconds).toFixed(1)} a second`);
    const drafts = said.usage.drafts;
    if (drafts?.rounds) parts.push(`${(1 + drafts.accepted / drafts.rounds).toFixed(2)} a round`);
  }
  view.foot.textContent = parts.join(" · ");
  view.foot.classList.toggle("bad", Boolean(failed) && failed !== "stopped");
  follow();
}

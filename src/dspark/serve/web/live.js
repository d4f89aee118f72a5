// What the server does right now: figures, three charts, and every answer under way as a strip of tokens.

import { $, askForKey, events, headers, reason } from "./api.js";

const CELLS = 600;      // tokens of a strip that are kept
const OVER = 6;         // finished answers that stay in view
const HISTORY = 120;    // seconds of the throughput's chart
const WORDS = 160;      // pieces of text that are kept, where text is shown
const [ACCEPTED, OWN, REJECTED] = [0, 1, 2];

const runs = new Map(); // id -> answer
const speeds = [];
let info = null;
let lastStats = null;
let colours = {};
let dirty = true;

export function startLive() {
  readColours();
  for (const name of ["dspark-theme", "resize"]) addEventListener(name, () => { readColours(); dirty = true; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); dirty = true; });
  requestAnimationFrame(draw);
  listen();
}

async function listen() {
  let wait = 500;
  for (;;) {
    try {
      const reply = await fetch("/live/events", { headers: headers() });
      if (reply.status === 401) { await askForKey(); continue; }
      if (!reply.ok) throw new Error(await reason(reply));
      wait = 500;
      for await (const { event, data } of events(reply)) take(event, JSON.parse(data));
      throw new Error("the server closed the stream");
    } catch (error) {
      about(`not connected: ${error.message}`, true);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, 10000);
  }
}

function about(text, bad = false) {
  $("about").textContent = text;
  $("about").classList.toggle("bad", bad);
}

function take(event, data) {
  if (event === "hello") {
    info = data;
    about(`${data.model} · drafter ${data.drafter} · scheduler ${data.scheduler} · ${data.max_len} tokens of context`);
    for (const run of runs.values()) run.box.remove();
    runs.clear();
    for (const one of data.running) {
      const run = open(one.id, one.kind, one.prompt_tokens, one.most, one.seconds);
      Object.assign(run, { tokens: one.tokens, rounds: one.rounds, accepted: one.accepted });
    }
  } else if (event === "stats") {
    figures(data);
  } else if (event === "batch") {
    for (const entry of data.entries) one(entry);
    $("note").hidden = !data.dropped;
    $("note").textContent = `${data.dropped} steps came faster than this page could take them in; they are not shown.`;
  } else if (event === "bye") {
    about("the server is stopping", true);
  }
  dirty = true;
}

function one(entry) {
  const [kind, id] = entry;
  if (kind === "start") {
    open(id, entry[2], entry[3], entry[4], 0);
    return;
  }
  const run = runs.get(id);
  if (!run) return;
  if (kind === "step") step(run, entry);
  else if (kind === "end") {
    Object.assign(run, { over: true, reason: entry[2], tokens: entry[3], seconds: entry[4], dirty: true });
    run.box.classList.add("over");
    tidy();
  }
}

function open(id, kind, prompt, most, seconds) {
  const box = document.createElement("div");
  box.className = "run";
  const facts = document.createElement("div");
  facts.className = "facts";
  const strip = document.createElement(info?.text ? "div" : "canvas");
  if (info?.text) strip.className = "words";
  else { strip.setAttribute("role", "img"); strip.setAttribute("aria-label", "Tokens: accepted, bonus, rejected"); }
  if (info?.text) strip.append(document.createElement("div"));
  box.append(facts, strip);
  $("runs").prepend(box);
  const run = {
    id, kind, prompt, most, box, facts, strip, cells: [], tokens: 0, rounds: 0, accepted: 0,
    began: performance.now() - 1000 * seconds, over: false, reason: "", dirty: true,
  };
  runs.set(id, run);
  return run;
}

function tidy() {
  const over = [...runs.values()].filter((run) => run.over);
  for (const run of over.slice(0, Math.max(0, over.length - OVER))) {
    run.box.remove();
    runs.delete(run.id);
  }
}

function step(run, [, , , verified, accepted, count, words, rejected]) {
  if (count && run.tokens) { run.rounds += 1; run.accepted += accepted; }
  run.tokens += count;
  for (let i = 0; i < count; i++) run.cells.push(i < accepted ? ACCEPTED : OWN);
  for (let i = accepted; i < verified; i++) run.cells.push(REJECTED);
  if (run.cells.length > 2 * CELLS) run.cells.splice(0, run.cells.length - CELLS);
  if (words) {
    const line = run.strip.firstChild;
    words.forEach((word, i) => line.append(piece(i < accepted ? "draft" : "own", word)));
    if (rejected.length) line.append(piece("rejected", rejected.join("")));
    while (line.childNodes.length > WORDS) line.firstChild.remove();
  }
  run.dirty = true;
}

function piece(kind, text) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  return span;
}

function figures(stats) {
  lastStats = stats;
  const speed = stats.tokens_per_second;
  if (speed !== null) {
    speeds.push(speed);
    if (speeds.length > HISTORY) speeds.shift();
  }
  $("speed").textContent = speed === null ? "–" : speed.toFixed(speed < 100 ? 1 : 0);
  $("length").textContent = stats.acceptance_length === null ? "–" : stats.acceptance_length.toFixed(2);
  $("running").textContent = stats.running;
  $("waiting").textContent = stats.waiting;
  $("pages").textContent = stats.pages_total ? `${Math.round((100 * stats.pages_used) / stats.pages_total)} %` : "–";
  $("speed-top").textContent = speeds.length ? `top ${Math.max(...speeds).toFixed(0)}` : "";
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["draft-strong", "own-strong", "rejected-strong", "line", "soft", "accent", "own"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function canvas(box) {
  const scale = devicePixelRatio || 1;
  const width = box.clientWidth, height = box.clientHeight;
  if (!width) return null;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (box.width !== w || box.height !== h) { box.width = w; box.height = h; }
  const context = box.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function draw() {
  requestAnimationFrame(draw);
  const live = [...runs.values()].some((run) => !run.over);
  if (!dirty && !live) return;
  for (const run of runs.values()) if (run.dirty || dirty || !run.over) drawRun(run);
  if (dirty) {
    drawSpeed();
    if (lastStats) { drawVerify(lastStats); drawAccept(lastStats); }
  }
  dirty = false;
}

function drawRun(run) {
  const seconds = run.over ? run.seconds : (performance.now() - run.began) / 1000;
  const now = Math.floor(seconds * 5);
  if (run.dirty || run.shownAt !== now) {
    run.shownAt = now;
    const speed = seconds > 0.2 ? `${(run.tokens / seconds).toFixed(1)} a second` : "";
    const length = run.rounds ? `${(1 + run.accepted / run.rounds).toFixed(2)} a round` : "";
    const state = run.over ? run.reason : run.tokens ? "" : "waiting or reading its prompt";
    const parts = [`${run.kind}, prompt ${run.prompt}`, `${run.tokens} of ${run.most}`, speed, length, state];
    run.facts.replaceChildren(Object.assign(document.createElement("b"), { textContent: `#${run.id}` }));
    for (const part of parts.filter(Boolean)) {
      run.facts.append(Object.assign(document.createElement("span"), { textContent: part }));
    }
  }
  if (run.strip.tagName === "CANVAS" && (run.dirty || dirty)) drawStrip(run);
  run.dirty = false;
}

function drawStrip(run) {
  const place = canvas(run.strip);
  if (!place) return;
  const { context, width, height } = place;
  const step = 7, shown = run.cells.slice(-Math.floor(width / step));
  const looks = [["draft-strong", 1], ["own-strong", 1], ["rejected-strong", 0.4]]; // a rejected draft is a short bar
  shown.forEach((cell, i) => {
    const [name, share] = looks[cell];
    context.fillStyle = colours[name];
    const tall = cell === OWN ? height : height * 0.8 * share + (cell === ACCEPTED ? 0 : 1);
    context.fillRect(i * step, height - tall, step - 2, tall);
  });
}

function drawSpeed() {
  const place = canvas($("speed-chart"));
  if (!place) return;
  const { context, width, height } = place;
  const top = Math.max(1, ...speeds) * 1.1;
  context.strokeStyle = colours.line;
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  if (speeds.length < 2) return;
  const span = Math.max(30, speeds.length) - 1; // seconds across
  const x = (i) => width - ((speeds.length - 1 - i) / span) * width;
  const y = (value) => height - 1 - (value / top) * (height - 6);
  context.beginPath();
  speeds.forEach((value, i) => context.lineTo(x(i), y(value)));
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x(0), height);
  context.fillStyle = colours.own;
  context.globalAlpha = 0.45;
  context.fill();
  context.globalAlpha = 1;
}

function bars(id, values, labels, colour, most) {
  const place = canvas($(id));
  if (!place || !values.length) return;
  const { context, width, height } = place;
  const slot = width / values.length, foot = 16;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  values.forEach((value, i) => {
    const tall = most > 0 ? Math.max(value > 0 ? 2 : 0, (value / most) * (height - foot - 14)) : 0;
    context.fillStyle = colour;
    context.fillRect(i * slot + slot * 0.15, height - foot - tall, slot * 0.7, tall);
    context.fillStyle = colours.soft;
    context.fillText(labels[i][0], i * slot + slot / 2, height - 3);
    if (labels[i][1]) context.fillText(labels[i][1], i * slot + slot / 2, height - foot - tall - 3);
  });
}

function drawVerify(stats) {
  const total = stats.verify_lens.reduce((a, b) => a + b, 0);
  const shares = stats.verify_lens.map((count) => (total ? count / total : 0));
  const labels = shares.map((share, i) => [String(i), share >= 0.005 ? `${Math.round(100 * share)}` : ""]);
  bars("verify-chart", shares, labels, colours["own-strong"], Math.max(0.01, ...shares));
}

function drawAccept(stats) {
  const shares = stats.verified_at.map((count, i) => (count ? stats.accepted_at[i] / count : 0));
  const labels = shares.map((share, i) => [String(i + 1), stats.verified_at[i] ? share.toFixed(2).slice(1) : ""]);
  bars("accept-chart", shares, labels, colours["draft-strong"], 1);
}

// Talking to the server: the key, and streams of server-sent events read by fetch (which, unlike EventSource, can
// send the key).

const KEY = "dspark-key";

export const $ = (id) => document.getElementById(id);

export function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

let asking = null;

/** Ask for the key; all who need it wait for the same answer. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      if ($("key").value) sessionStorage.setItem(KEY, $("key").value.trim());
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

/** The message of a failed reply, in words. */
export async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Events of a streaming reply: {event, data}, data as text. Ends when the stream does. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        const found = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("data: ")) found.data += line.slice(6);
          else if (line.startsWith("event: ")) found.event = line.slice(7);
        }
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A setting that survives the page, where the browser lets us. */
export const stored = {
  get(name) { try { return localStorage.getItem(`dspark-${name}`); } catch { return null; } },
  set(name, value) { try { localStorage.setItem(`dspark-${name}`, value); } catch { /* private mode */ } },
};

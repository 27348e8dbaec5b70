/**
 * Hands a trace to Perfetto in a window of its own, as its documentation of deep links has it: PING until it answers
 * PONG, then the bytes. They go from window to window and stay on this machine.
 */
export const perfetto = { origin: "https://ui.perfetto.dev" };
Object.assign(window, { perfetto }); // for who has one of their own

/** Whether this page may read what lies beside it: from a server, not from a disk. */
export const canRead = (): boolean => location.protocol.startsWith("http");

/** To be called in a click, or the browser opens no window. Rejects with what to say. */
export async function openInPerfetto(href: string, title: string): Promise<void> {
  const other = window.open(perfetto.origin);
  if (!other) throw new Error("The browser opened no window: allow it for this page.");
  const asking = new AbortController();
  try {
    const [buffer] = await Promise.all([read(href), answer(other, asking.signal)]);
    const fileName = decodeURIComponent(href.split("/").pop() ?? "");
    other.postMessage({ perfetto: { buffer, title, fileName } }, perfetto.origin, [buffer]);
  } catch (error) {
    other.close(); // or it would hide what this page says
    throw error;
  } finally {
    asking.abort();
  }
}

async function read(href: string): Promise<ArrayBuffer> {
  const found = await fetch(href).catch(() => null);
  if (!found?.ok) throw new Error(`The trace cannot be read (${found?.status ?? "no answer"}): is the command that serves this page still running?`);
  return found.arrayBuffer();
}

/** Resolves once the other window listens. */
function answer(other: Window, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setInterval(() => {
      if (other.closed) reject(new Error("Perfetto's window was closed before it was ready."));
      else other.postMessage("PING", "*"); // which tells nothing: before it has loaded its origin is not yet its own
    }, 100);
    signal.addEventListener("abort", () => clearInterval(timer));
    window.addEventListener("message", event => {
      if (event.source === other && event.origin === perfetto.origin && event.data === "PONG") resolve();
    }, { signal });
  });
}

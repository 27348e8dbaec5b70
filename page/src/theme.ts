/** Light, dark, or as the system. Paper is white. */
import { computed, effect, signal } from "@preact/signals";

export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
const KEY = "profiler_wrapper.theme";

const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
export const printing = signal(false);
export const theme = signal<Theme>(stored());

/** Whether what is drawn now is dark: canvases read it, and are drawn again. */
export const drawnDark = computed(() => !printing.value && (theme.value === "dark" || (theme.value === "auto" && systemDark.value)));

function stored(): Theme {
  try {
    return THEMES.find(one => one === localStorage.getItem(KEY)) ?? "auto";
  } catch {
    return "auto"; // no storage for this file
  }
}

export function nextTheme(): void {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]!;
  try {
    localStorage.setItem(KEY, theme.value);
  } catch { /* no storage for this file */ }
}

export function followTheme(): void {
  system.addEventListener("change", () => { systemDark.value = system.matches; });
  addEventListener("beforeprint", () => { printing.value = true; });
  addEventListener("afterprint", () => { printing.value = false; });
  effect(() => { document.documentElement.dataset["theme"] = drawnDark.value ? "dark" : "light"; });
}

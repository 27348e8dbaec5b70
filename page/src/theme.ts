/** Light, dark, or as the system. Paper is white. */
import { computed, effect, signal } from "@preact/signals";
import { isDark, store, stored, system, THEMES } from "./theme_choice";

const systemDark = signal(system.matches);
export const printing = signal(false);
export const theme = signal(stored());

/** Whether what is drawn now is dark: canvases read it, and are drawn again. */
export const drawnDark = computed(() => !printing.value && isDark(theme.value, systemDark.value));

export function nextTheme(): void {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]!;
  store(theme.value);
}

export function followTheme(): void {
  system.addEventListener("change", () => { systemDark.value = system.matches; });
  addEventListener("beforeprint", () => { printing.value = true; });
  addEventListener("afterprint", () => { printing.value = false; });
  effect(() => { document.documentElement.dataset["theme"] = drawnDark.value ? "dark" : "light"; });
}

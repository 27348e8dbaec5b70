/** Before anything is seen: the theme. Once the title and the headline are: the program, which takes long to compile. */
import { isDark, stored, system } from "./theme_choice";

document.documentElement.dataset["theme"] = isDark(stored(), system.matches) ? "dark" : "light";

let isStarted = false;

function start(): void {
  if (isStarted) return;
  isStarted = true;
  const script = document.createElement("script");
  script.textContent = document.getElementById("program")!.textContent;
  document.body.append(script);
}

addEventListener("DOMContentLoaded", () => {
  requestAnimationFrame(() => setTimeout(start));
  setTimeout(start, 100); // frames do not come to a tab that is not seen
});

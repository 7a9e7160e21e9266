// The theme of a page without Gradio: the system's, until the button says otherwise.

/** Make the button #theme of the page switch between light and dark. */
export function themeButton() {
  const toggle = document.getElementById("theme");
  const show = (dark) => {
    document.body.classList.toggle("dark", dark);
    toggle.textContent = dark ? "Light" : "Dark";
    toggle.setAttribute("aria-label", dark ? "Switch to the light theme" : "Switch to the dark theme");
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  show(system.matches);
  system.addEventListener("change", () => show(system.matches));
  toggle.addEventListener("click", () => show(!document.body.classList.contains("dark")));
}

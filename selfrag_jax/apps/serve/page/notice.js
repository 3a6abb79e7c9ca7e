// Short messages: a line above the question field, and words for screen readers alone.

import { element } from "./text.js";

const place = document.getElementById("notice");
const announcer = document.getElementById("announcer");

// Show a line until the next one, or until it is closed. `act` belongs to a button with `label`.
export function notice(text, { label, act, isError = false } = {}) {
  place.classList.toggle("error", isError);
  place.replaceChildren();
  if (!text) return;
  place.append(element("p", text));
  if (act) {
    const button = element("button", label);
    button.type = "button";
    button.addEventListener("click", () => {
      clear();
      act();
    });
    place.append(button);
  }
  const close = element("button", "Close", "quiet");
  close.type = "button";
  close.addEventListener("click", () => {
    clear();
    document.getElementById("question").focus();
  });
  place.append(close);
}

export const clear = () => notice("");

// Say a text once. Only the newest stands in the page, so that nobody reads an answer twice when browsing.
export function announce(text) {
  if (text.trim()) announcer.replaceChildren(element("p", text));
}

// One question with its answer, and the passages that were retrieved for it.

import { copyOf, count, showText, visible } from "./text.js";

const SCORE = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
export const scoreText = (score) => (typeof score === "number" ? SCORE.format(score) : "–");

const LONG = 1000; // characters of a passage that may need more room than it gets

const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1).trimEnd()}…` : text);

// What a passage is called: its title, or else the words it begins with.
function titleOf(source) {
  const title = visible(source.title || source.text || source.id || "").trim();
  return shorten(title, 120) || "A passage without a title";
}

const placeOf = (source) => visible(source.source ?? "").slice(0, 300);

function makeSource(source, id, isSearch) {
  const item = copyOf("source-template");
  const part = (name) => item.querySelector(name);
  item.id = id;
  item.classList.toggle("is-cited", source.is_cited === true);
  part(".number").textContent = source.number;
  part(".title").textContent = titleOf(source);
  part(".place").textContent = placeOf(source);
  part(".snippet").textContent = source.title ? visible(source.text.slice(0, 300)) : ""; // or it is the title already
  part(".mark").textContent = isSearch ? "" : source.is_cited ? "cited" : "not cited";
  part(".value").textContent = scoreText(source.score);
  part(".passage").textContent = source.text;
  if (source.text.length > LONG) part(".passage").tabIndex = 0; // it scrolls, by keyboard too
  return item;
}

export function sourcesText(sources) {
  const cited = sources.filter((source) => source.is_cited).length;
  return `${count(sources.length, "passage", "passages")} read, ${cited || "none"} cited`;
}

// An answer as it is copied: the text, and the sources that it cites.
export function textToCopy(turn) {
  const cited = (turn.sources ?? []).filter((source) => source.is_cited);
  const lines = cited.map(
    (source) => `[${source.number}] ${[titleOf(source), placeOf(source)].filter(Boolean).join(", ")}`,
  );
  return [turn.answer, ...(lines.length ? [lines.join("\n")] : [])].join("\n\n");
}

const STATES = {
  stopped: () => "Stopped.",
  failed: (turn) => turn.error.message,
  done: (turn) => {
    if (turn.finish === "length") return "The answer is cut here, at the longest length. Settings can change that.";
    return turn.answer.trim() ? "" : "The model answered with nothing.";
  },
  writing: () => "",
  found: (turn) => (turn.sources.length ? "" : "Nothing was found."),
};

// What stands under an answer, besides its sources: why it ended early, or that it failed.
export const stateText = (turn) => STATES[turn.state](turn);

export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.element = copyOf("turn-template");
    this.frame = 0;
    this.part(".asked").textContent = turn.question;
    for (const name of ["copy", "again", "remember", "retry"]) {
      this.part(`.${name}`).addEventListener("click", () => actions[name](this));
    }
    this.update();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  // Show new tokens with the next frame: several may come in one.
  soon() {
    this.frame ||= requestAnimationFrame(() => this.update());
  }

  update() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { turn } = this;
    const isWriting = turn.state === "writing";
    const isFailed = turn.state === "failed";
    this.element.dataset.state = turn.state;
    this.part(".answer h2").textContent = turn.isSearch ? "Search results" : "Answer";
    this.part(".waiting").hidden = !isWriting || turn.answer !== "";
    this.part(".doing").textContent = turn.doing;
    showText(this.part(".text"), turn.answer, turn.sources && ((number, text) => this.link(number, text)));
    const text = stateText(turn);
    this.part(".state").hidden = !text;
    this.part(".state p").textContent = text;
    this.part(".state .retry").hidden = !isFailed;
    this.part(".actions").hidden = isWriting || isFailed || !turn.answer.trim();
    this.updateSources();
  }

  // An answer without any says so, if it was meant to have some.
  updateSources() {
    const { turn } = this;
    const sources = turn.sources ?? [];
    const isSearched = turn.state === "done" && turn.where !== "";
    const section = this.part(".sources");
    section.hidden = !sources.length && !isSearched;
    if (section.hidden || this.listed === turn.sources) return;
    this.listed = turn.sources;
    const found = turn.isSearch ? `${count(sources.length, "passage", "passages")} found` : sourcesText(sources);
    this.part(".sources h3").textContent = sources.length ? found : "No passage was found to read";
    const items = sources.map((source) => makeSource(source, this.sourceId(source.number), turn.isSearch));
    this.part(".sources ol").replaceChildren(...items);
  }

  sourceId(number) {
    return `source-${this.turn.id}-${number}`;
  }

  link(number, text) {
    const source = this.turn.sources.find((source) => source.number === number);
    if (!source) return null;
    const made = document.createElement("a");
    made.href = `#${this.sourceId(number)}`;
    made.className = "citation";
    made.textContent = text;
    made.setAttribute("aria-label", `${text} ${titleOf(source)}`);
    made.addEventListener("click", (event) => {
      event.preventDefault(); // "back" should leave the chat, not step through citations
      const details = document.getElementById(this.sourceId(number)).querySelector("details");
      details.open = true;
      details.querySelector("summary").focus({ preventScroll: true });
      details.scrollIntoView({ block: "nearest" });
    });
    return made;
  }
}

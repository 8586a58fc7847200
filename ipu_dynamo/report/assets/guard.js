// uPlot throws when it loads where navigator.language is no language tag, as under LANG=C.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US", configurable: true });
}

"use strict";
// Draws each figure when it comes near the screen, in the colours of the page, and saves it.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = window.reproFigures ||= {};
  const drawn = new Set();
  const source = document.currentScript.dataset.plotly;
  let printing = false;

  const copy = (value) => JSON.parse(JSON.stringify(value));
  const theme = () => {
    const night = dark.matches && !printing;
    return night ? { ink: "#e6e9ec", grid: "#3a424a", paper: "#14171a", veil: "rgba(20,23,26,0.75)" } : { ink: "#1b1f24", grid: "#e3e6e9", paper: "#ffffff", veil: "rgba(255,255,255,0.75)" };
  };

  // Black lines would vanish on a dark page, and the dark colours of labels would be hard to read.
  const bright = { "#000000": "#ffffff", "#00704F": "#5fd3a8", "#B34700": "#ff9d6b", "#8A5A00": "#e5bd5e", "#595959": "#b4bcc4",
    "#0072B2": "#3fa4dd", "rgba(0,0,0,0.16)": "rgba(255,255,255,0.16)" };
  const recolour = (value) => {
    if (Array.isArray(value)) return value.map(recolour);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, recolour(part)]));
    return typeof value === "string" && bright[value] ? bright[value] : value;
  };

  // As in the still figures: 1, 2 and 5 of every decade in full over less than two decades, else powers of ten. Over less
  // than one, as many round numbers as there is room for, or the library's own.
  const scientific = (value) => {
    const exponent = Math.floor(Math.log10(value) + 1e-9), mantissa = Number((value / 10 ** exponent).toPrecision(3));
    return (mantissa === 1 ? "" : `${mantissa}·`) + `10<sup>${String(exponent).replace("-", "−")}</sup>`;
  };
  // All labels of an axis are written alike, but for 1 and 10.
  const labels = (values, low, high) => {
    const plain = values.every((value) => value < 10 ** (low - 0.3) || value > 10 ** (high + 0.3) || (value > 0.99e-4 && value < 1e5));
    return values.map((value) => plain || (value > 0.99 && value < 11) ? String(Number(value.toPrecision(6))) : scientific(value));
  };
  // A title that is longer than its axis goes on in the next line.
  const broken = (words, length) => {
    const most = Math.max(12, Math.floor(length / 6.3));
    const lines = [];
    for (const word of (words || "").split(" ")) {
      const last = lines.length - 1;
      if (last < 0 || lines[last].length + word.length >= most) lines.push(word); else lines[last] += ` ${word}`;
    }
    return lines;
  };
  const logTicks = (data, layout, name, most, length) => {
    const drawnAt = data.flatMap((trace) => trace[name] || []).concat((layout.shapes || []).filter((shape) =>
      (shape[name + "ref"] || name) === name).map((shape) => shape[name + "0"])).filter((value) => value > 0);
    const low = Math.log10(Math.min(...drawnAt)), high = Math.log10(Math.max(...drawnAt));
    // Whether neighbours have room for their labels, which lie along the axis below a figure.
    const needs = (value) => name === "x" ? 7 * String(Number(value.toPrecision(6))).length + 6 : 16;
    const apart = (values) => values.every((value, i) =>
      i === 0 || Math.log10(value / values[i - 1]) * length / (1.1 * (high - low)) > needs(value));
    if (!(high - low > 0.8)) {
      const inside = (value) => Math.log10(value) >= low - 0.04 && Math.log10(value) <= high + 0.04;
      const decades = [Math.floor(low), Math.floor(low) + 1];
      for (const steps of [[1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9], [1, 1.5, 2, 3, 5, 7], [1, 2, 5]]) {
        const values = decades.flatMap((power) => steps.map((step) => step * 10 ** power)).filter(inside);
        if (values.length < 3) break;
        if (values.length <= most && apart(values)) return { tickmode: "array", tickvals: values, ticktext: labels(values, low, high) };
      }
      return { nticks: most };
    }
    const every = Math.ceil((high - low) / most);
    const wide = high - low >= 2 || every > 1;
    const at = (steps) => {
      const values = [];
      for (let power = Math.floor(low) - 1; power <= Math.ceil(high) + 1; power += 1) {
        if (!wide || power % every === 0) values.push(...steps.map((step) => step * 10 ** power));
      }
      return values;
    };
    const pad = 0.08 * (high - low); // the library draws a little more than the data
    const seen = (values) => values.filter((value) => Math.log10(value) >= low - pad && Math.log10(value) <= high + pad).length;
    const values = (wide ? [[1]] : [[1, 2, 5], [1, 3], [1]]).map(at).find((found) => seen(found) <= most || wide) || at([1]);
    return { tickmode: "array", tickvals: values, ticktext: labels(values, low, high) };
  };

  const styled = (id, width) => {
    const look = theme(), night = dark.matches && !printing;
    const stored = figures[id];
    const data = night ? recolour(copy(stored.data)) : copy(stored.data);
    const layout = copy(stored.layout);
    const axis = (part) => ({ ...part, color: look.ink, gridcolor: look.grid, linecolor: look.ink, zeroline: false, exponentformat: "power",
      showline: true, ticks: "outside", ticklen: 4, tickcolor: look.ink });
    // Labels that turn would move the margin, and that may turn them back, without an end.
    layout.xaxis = { nticks: width < 500 ? 5 : 8, ...axis(layout.xaxis || {}), tickangle: 0 };
    layout.yaxis = axis(layout.yaxis || {});
    const beside = broken(layout.yaxis.title?.text, (layout.height || 330) - 75), below = broken(layout.xaxis.title?.text, width - 90);
    layout.yaxis.title = { ...layout.yaxis.title, text: beside.join("<br>"), standoff: 8 };
    layout.xaxis.title = { ...layout.xaxis.title, text: below.join("<br>") };
    const more = 15 * Math.max(0, below.length - 1);
    for (const name of ["x", "y"]) {
      const part = layout[name + "axis"];
      if (part.type === "log" && !part.tickvals) Object.assign(part, logTicks(data, layout, name, width < 500 && name === "x" ? 5 : 8,
        name === "x" ? width - 74 : layout.height || 330));
    }
    const named = data.filter((trace) => trace.name && trace.showlegend !== false && trace.type !== "heatmap");
    const across = Math.max(1, Math.floor(width / 190));
    const legend = named.length ? Math.ceil(named.length / across) * 20 + 10 : 0;
    // Labels of upright lines stand in rows above.
    const above = 14 + Math.max(0, ...(layout.annotations || []).map((note) => "yshift" in note ? note.yshift + 4 : 0));
    const height = (layout.height || 330) + legend + 26 + above + more;
    return { data, layout: {
      ...layout, height, width, paper_bgcolor: look.paper, plot_bgcolor: look.paper, hovermode: "closest",
      // A finger that scrolls the page must not zoom a figure; with a mouse a drag zooms and a double click goes back.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      font: { color: look.ink, size: width < 500 ? 11 : 12, family: getComputedStyle(document.body).fontFamily },
      margin: { l: layout.yaxis.visible === false ? 14 : 56, r: 18, t: above, b: 46 + more }, showlegend: named.length > 0,
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
      shapes: (layout.shapes || []).map((shape) => ({ ...shape, line: { ...shape.line, color: look.ink } })),
      annotations: (layout.annotations || []).map((note) => ({ ...(note.xref === "paper" ? { bgcolor: note.xanchor === "left" ? look.paper : look.veil } : {}), ...note,
        // A narrow figure has no room for a claim and its label in one line.
        text: width < 500 ? note.text.replace("</b>: ", "</b><br>") : note.text, font: { color: look.ink, ...(note.font || {}) } })),
    } };
  };

  const draw = (canvas) => {
    const id = canvas.dataset.figure;
    if (!figures[id] || !window.Plotly) return;
    const { data, layout } = styled(id, canvas.clientWidth);
    canvas.querySelector("noscript")?.remove();
    Plotly.react(canvas, data, layout, { responsive: false, displayModeBar: false });
    canvas.style.minHeight = "";
    if (drawn.has(canvas)) return;
    drawn.add(canvas);
    // Inside one decade, or between ticks that are given, only the library's own will do.
    canvas.on("plotly_relayout", (change) => {
      for (const axis of ["xaxis", "yaxis"]) {
        if (!canvas.layout[axis].tickvals) continue;
        if (`${axis}.range[0]` in change) Plotly.relayout(canvas, { [`${axis}.tickmode`]: "auto" });
        if (change[`${axis}.autorange`]) Plotly.relayout(canvas, { [`${axis}.tickmode`]: "array" });
      }
    });
  };

  // The library is large: words can be read before it is there, and it comes when a figure is near or all else is done.
  let library;
  const withLibrary = () => library ||= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = source;
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
  // So do the numbers of each figure: a page may hold a hundred. A script and no fetch, which files do not allow.
  const asked = new Map();
  const withNumbers = (canvas) => {
    const id = canvas.dataset.figure;
    if (!asked.has(id)) asked.set(id, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = canvas.dataset.src;
      script.onload = resolve;
      script.onerror = reject;
      document.head.append(script);
    }));
    return asked.get(id);
  };
  const ready = (canvas) => Promise.all([withLibrary(), withNumbers(canvas)]);

  const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !drawn.has(entry.target)) ready(entry.target).then(() => draw(entry.target));
  }), { rootMargin: "600px" });
  const canvases = [...document.querySelectorAll("[data-figure]")];
  canvases.forEach((canvas) => near.observe(canvas));
  // All of them, one after another, once the page has come to rest: printing cannot wait.
  addEventListener("load", () => setTimeout(async () => { for (const canvas of canvases) await ready(canvas); }, 1500));

  const again = () => drawn.forEach(draw);
  let waiting;
  let before = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === before) return;
    before = document.documentElement.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });
  dark.addEventListener("change", again);
  addEventListener("beforeprint", () => { printing = true; canvases.forEach(draw); });
  addEventListener("afterprint", () => { printing = false; again(); });

  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => {
    const canvas = button.closest("figure").querySelector("[data-figure]");
    ready(canvas).then(() => {
      if (!drawn.has(canvas)) draw(canvas);
      const size = { width: 960, height: Math.round(canvas.clientHeight * (canvas.clientWidth < 600 ? 1.2 : 1)) };
      Plotly.downloadImage(canvas, { format: button.dataset.save, filename: canvas.dataset.figure.replace("/", "-"), scale: 2, ...size });
    });
  }));

  // The table of a figure is made when it is asked for: all of them together would be many times the page.
  document.querySelectorAll("figure.plot details.numbers").forEach((part) => part.addEventListener("toggle", async () => {
    const place = part.querySelector(".scroll");
    const canvas = part.closest("figure").querySelector("[data-figure]");
    await withNumbers(canvas);
    if (!part.open || place.firstChild) return;
    const { headings, rows } = figures[canvas.dataset.figure];
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    headings.forEach((heading) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = heading;
      head.append(cell);
    });
    const body = table.createTBody();
    rows.forEach((row) => {
      const line = body.insertRow();
      row.forEach((value, i) => {
        const cell = document.createElement(i ? "td" : "th");
        if (!i) cell.scope = "row";
        if (String(value).length > 9 && Number.isNaN(Number(value))) cell.className = "words";
        cell.textContent = value;
        line.append(cell);
      });
    });
    place.append(table);
    place.classList.add("tall");
  }));
})();

// The text of /metrics as samples, and what Prometheus' own functions would make of two such pages.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?/g;

export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

// The samples of each model by its name; those that name none are in every model.
export function byModel(samples, models) {
  const of = ({ labels }, model) => labels.model_name === undefined || labels.model_name === model;
  return new Map(models.map((model) => {
    const mine = [...samples].map(([name, all]) => [name, all.filter((sample) => of(sample, model))]);
    return [model, new Map(mine.filter(([, all]) => all.length))];
  }));
}

// Of a share that each of a model's engines reports.
export function mean(samples, name) {
  return sum(samples, name) / (samples.get(name)?.length || 1);
}

export function sum(samples, name) {
  return (samples.get(name) ?? []).reduce((total, sample) => total + sample.value, 0);
}

// A counter that a restart has set back counts from zero, as in Prometheus' rate().
export function increase(before, now, name) {
  const [a, b] = [sum(before, name), sum(now, name)];
  return b < a ? b : b - a;
}

function buckets(samples, name) {
  const found = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const bound = Number(labels.le.replace("+Inf", "Infinity"));
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return [...found].sort((x, y) => x[0] - y[0]);
}

// Count, mean and quantiles of what a histogram took in between two pages; quantiles as histogram_quantile() has them.
export function distribution(before, now, name) {
  const old = new Map(buckets(before, name));
  const rows = buckets(now, name).map(([bound, value]) => [bound, value - (old.get(bound) ?? 0)]);
  const count = rows.length ? rows[rows.length - 1][1] : 0;
  if (!(count > 0)) return null;
  const total = increase(before, now, `${name}_sum`);
  return { count, mean: total / count, quantile: (share) => quantile(rows, count, share) };
}

function quantile(rows, count, share) {
  const rank = share * count;
  let [low, below] = [0, 0];
  for (const [bound, value] of rows) {
    if (value >= rank) {
      if (bound === Infinity) return low;
      return low + (bound - low) * ((rank - below) / Math.max(value - below, 1e-12));
    }
    [low, below] = [bound, value];
  }
  return low;
}

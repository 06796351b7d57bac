// Fills the page from the data element; nothing is fetched.
const DATA = JSON.parse(document.getElementById("data").textContent);
const OUTCOMES = DATA.order.map(([transport, scope]) => DATA.transports[transport][scope]);
const at = (id) => document.getElementById(id);

function element(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function fillHead() {
  const { model, train, gen, cluster } = DATA;
  at("model").textContent = `${model.name}: ${train.layout} to ${gen.layout}`;
  at("route").textContent = `${count(train.ranks)} trainer ranks to ${count(gen.ranks)} inference ranks on ${cluster.name}` +
    `${DATA.colocated ? ", sharing their ranks" : ""}. ${size(model.bytes)} in ${count(model.tensors)} tensors, planned in ` +
    `${DATA.plan_seconds.toFixed(2)} s.`;
  at("foot").textContent = `Digest ${DATA.digest}. Model: ${model.source}. Cluster: ${cluster.source}. ` +
    "All times are predictions of a cost model, not measurements.";
}

function fillTiles(shown) {
  const others = OUTCOMES.filter((o) => o !== shown);
  const against = others.find((o) => o.title === "gather_broadcast") || others[0];
  const ratio = against ? against.predicted_seconds / shown.predicted_seconds : 1;
  const tiles = [
    [seconds(shown.predicted_seconds), `predicted, ${shown.title}`],
    [seconds(DATA.bound_seconds), `bound, reached to ${percent(shown.bound_share)}`],
    [against ? `${digits(ratio)} x` : "-", against ? `as fast as ${against.title}` : ""],
    [size(shown.peak_extra_bytes_per_rank), "extra memory per rank, at most"],
    [shown.limited_by, "is what limits it", "text"],
  ];
  at("tiles").replaceChildren();
  for (const [value, text, kind] of tiles) {
    const tile = element(at("tiles"), "div", undefined, `tile ${kind || ""}`);
    element(tile, "b", value);
    element(tile, "span", text);
  }
}

function table(id, head, rows, wordy = []) {
  at(id).replaceChildren();
  const line = element(element(at(id), "thead"), "tr");
  head.forEach((text) => element(line, "th", text));
  const body = element(at(id), "tbody");
  rows.forEach((row, i) => {
    const made = element(body, "tr", undefined, i === 0 && id === "compare" ? "lead" : "");
    row.forEach((text) => element(made, "td", text, wordy.includes(i) ? "words" : ""));
  });
}

const FIGURES = [
  ["predicted time", (o) => seconds(o.predicted_seconds)],
  ["bound", (o) => `${seconds(o.bound_seconds)} (${DATA.bound.limited_by})`],
  ["share of the bound", (o) => percent(o.bound_share)],
  ["limited by", (o) => o.limited_by],
  ["bytes over the network", (o) => size(o.bytes.network)],
  ["bytes inside domains", (o) => size(o.bytes.in_domain)],
  ["bytes copied locally", (o) => size(o.bytes.local)],
  ["busiest sender over mean", (o) => o.busiest_send_over_mean.toFixed(3)],
  ["busiest receiver over mean", (o) => o.busiest_recv_over_mean.toFixed(3)],
  ["messages", (o) => count(o.messages)],
  ["buckets", (o) => count(o.buckets)],
  ["extra memory per rank, at most", (o) => size(o.peak_extra_bytes_per_rank)],
  ...["pack", "network", "in_domain", "unpack", "load"].map((phase) =>
    [`busy: ${phase.replace("_", "-")}`, (o) => seconds(o.phases[phase])]),
];

function fillTables() {
  table("compare", ["", ...OUTCOMES.map((o) => o.title)], FIGURES.map(([name, pick]) => [name, ...OUTCOMES.map(pick)]), [3]);
  const rates = DATA.cluster;
  const assumed = new Set(rates.assumed);
  const rate = (name, key, text) => [name, text, assumed.has(key) ? "assumed" : "public"];
  table("rates", ["", "value", "figure is"], [
    rate("network port, each direction", "nic_rate", `${size(rates.nic_rate)}/s`),
    rate("share that payload reaches", "network_efficiency", percent(rates.network_efficiency)),
    rate("loss where flows meet", "flow_loss", percent(rates.flow_loss)),
    rate("fast link of a rank, each direction", "domain_rate", `${size(rates.domain_rate)}/s`),
    rate("share that the exchange reaches", "domain_efficiency", percent(rates.domain_efficiency)),
    rate("packing and unpacking", "copy_rate", `${size(rates.copy_rate)}/s`),
    rate("network latency, per bucket", "network_latency", seconds(rates.network_latency)),
    rate("each message more", "message_overhead", seconds(rates.message_overhead)),
    rate("overhead of a bucket", "bucket_overhead", seconds(rates.bucket_overhead)),
    rate("loader, per whole tensor", "load_seconds_per_tensor", seconds(rates.load_seconds_per_tensor)),
    rate("ranks of a domain", "domain_ranks", String(rates.domain_ranks)),
    rate("network ports of a node", "node_ports", `${rates.node_ports} for ${rates.node_ranks} ranks`),
  ]);
  for (const note of DATA.assumptions) element(at("assumptions"), "li", note);
}

function drawShared() {
  drawBars(at("times"), OUTCOMES.map((o) => ({
    name: o.title.replace("scope ", ""), value: `${seconds(o.predicted_seconds)} (${percent(o.bound_share)})`,
    parts: [{ name: "predicted", value: o.predicted_seconds, colour: "accent" }],
  })), "Predicted time by transport", seconds, { value: DATA.bound_seconds, name: `bound ${seconds(DATA.bound_seconds)}` });
  drawBars(at("bytes"), OUTCOMES.map((o) => ({
    name: o.title.replace("scope ", ""), value: size(o.bytes.network + o.bytes.in_domain + o.bytes.local),
    parts: Object.keys(LINK_NAME).map((link) => ({ name: LINK_NAME[link], value: o.bytes[link], colour: link })),
  })), "Bytes by link class and transport", size);
}

function show(number) {
  const shown = OUTCOMES[number];
  [...at("choices").children].forEach((choice, i) => choice.setAttribute("aria-checked", String(i === number)));
  fillTiles(shown);
  at("heat-hint").textContent = `${shown.title}: bytes in all of the refit; hover for amounts`;
  drawHeat(at("heat"), shown.heat);
  const per = shown.timeline.buckets_per_span;
  at("timeline-hint").textContent = `${shown.title}: ${count(shown.buckets)} buckets` +
    `${per > 1 ? `, ${per} to a bar` : ""}; the paler a bar, the more its resource waits`;
  drawTimeline(at("timeline"), shown.timeline, shown, DATA.bound_seconds);
  const line = (kind) => (rank) => [kind, rank.place, size(rank.network_bytes)];
  table("busiest", ["", "rank", "network bytes"],
    [...shown.busiest_senders.map(line("sends")), ...shown.busiest_receivers.map(line("receives"))]);
  table("paths", ["path", "tensors", "network", "in-domain", "local"], Object.entries(shown.bytes_by_path).map(
    ([path, b]) => [path, count(b.tensors), size(b.network), size(b.in_domain), size(b.local)]));
}

function addChoices() {
  OUTCOMES.forEach((outcome, number) => {
    const choice = element(at("choices"), "button", outcome.title, "choice");
    choice.type = "button";
    choice.setAttribute("role", "radio");
    choice.addEventListener("click", () => {
      location.hash = String(number);
    });
  });
}

function followPointer() {
  const tip = at("tip");
  document.addEventListener("pointermove", (event) => {
    const text = event.target.dataset ? event.target.dataset.tip : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
}

at("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
fillHead();
fillTables();
drawShared();
addChoices();
followPointer();
// The number after "#" chooses the outcome, so that a view can be linked to.
const chosen = () => show(Math.min(Number(location.hash.slice(1)) || 0, OUTCOMES.length - 1));
addEventListener("hashchange", chosen);
chosen();

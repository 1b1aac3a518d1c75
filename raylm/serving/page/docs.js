// The server's OpenAPI document, as a page.

import { get } from "./api.js";
import { byId, element } from "./dom.js";
import { fieldTable, typeName } from "./schema.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const root = byId("docs");

function route(path, method, operation, types) {
  const summary = element(
    "summary",
    "",
    element("span", "method", method.toUpperCase()),
    element("code", "", path),
    operation.summary ? ` ${operation.summary}` : "",
  );
  const parts = [summary];
  if (operation.description) parts.push(element("p", "text", operation.description));
  if (operation.parameters?.length) parts.push(element("h4", "", "Parameters"), parameters(operation.parameters));
  for (const [type, content] of Object.entries(operation.requestBody?.content ?? {})) {
    parts.push(element("h4", "", `Body (${type}): `, typeName(content.schema)));
    const named = types[content.schema?.$ref?.split("/").pop()];
    parts.push(fieldTable(named ?? content.schema));
  }
  if (operation.responses) parts.push(element("h4", "", "Answers"), answers(operation.responses));
  const made = element("details", "route", ...parts);
  made.dataset.words = `${method} ${path} ${operation.summary ?? ""} ${operation.tags ?? ""}`.toLowerCase();
  return made;
}

function parameters(list) {
  const rows = list.map((each) =>
    row(element("code", "", each.name), each.in, typeName(each.schema), each.description ?? ""),
  );
  return element("table", "", element("tbody", "", ...rows));
}

function answers(responses) {
  const rows = Object.entries(responses).map(([status, response]) => {
    const types = Object.entries(response.content ?? {}).map(([type, { schema }]) => {
      // A stream is a string to OpenAPI; what its events are stands beside that.
      const event = schema?.["x-event"];
      return element("div", "", `${type}: `, ...(event ? ["events, each ", typeName(event)] : [typeName(schema)]));
    });
    return row(status, response.description ?? "", element("div", "", ...types));
  });
  return element("table", "", element("tbody", "", ...rows));
}

function row(...cells) {
  return element("tr", "", ...cells.map((cell) => element("td", "", cell)));
}

function schema([name, value]) {
  const made = element("details", "route", element("summary", "", element("code", "", name)));
  made.id = `schema-${name}`;
  made.dataset.words = name.toLowerCase();
  if (value.description) made.append(element("p", "text", value.description));
  made.append(value.properties ? fieldTable(value) : typeName(value));
  return made;
}

function find() {
  const words = byId("find").value.toLowerCase().split(/\s+/);
  for (const each of root.querySelectorAll("details.route")) {
    each.hidden = !words.every((word) => each.dataset.words.includes(word));
  }
}

/** A link to a schema opens it. */
function openTarget() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

async function load() {
  const document_ = await get("openapi.json");
  const types = document_.components?.schemas ?? {};
  const routes = Object.entries(document_.paths).flatMap(([path, operations]) =>
    METHODS.filter((method) => operations[method]).map((method) => route(path, method, operations[method], types)),
  );
  const schemas = Object.entries(types).map(schema);
  root.replaceChildren(
    element("h2", "", `${document_.info.title} ${document_.info.version}`),
    ...(document_.info.description ? [element("p", "text", document_.info.description)] : []),
    ...routes,
    element("h2", "", "Types"),
    ...schemas,
  );
  openTarget();
}

byId("find").addEventListener("input", find);
addEventListener("hashchange", openTarget);
load().catch((error) => root.replaceChildren(element("p", "error", error.message)));

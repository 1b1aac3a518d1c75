// JSON schemas as tables of fields; a type with a name is a link to its own table.

import { element } from "./dom.js";

/** What a value of the schema is, in a few words. */
export function typeName(schema) {
  if (!schema || schema === true || !Object.keys(schema).length) return element("span", "", "anything");
  if (schema.$ref) return link(schema.$ref.split("/").pop());
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return joined(several.map(typeName), schema.allOf ? " and " : " or ");
  if (schema.enum) return joined(schema.enum.map(literal), " or ");
  if (schema.const !== undefined) return literal(schema.const);
  if (schema.type === "array") return element("span", "", "list of ", typeName(schema.items));
  const types = [schema.type ?? "object"].flat().join(" or ");
  return element("span", "", types, bounds(schema));
}

/** The fields of an object; nothing for other values. */
export function fieldTable(schema) {
  const required = new Set(schema?.required ?? []);
  const rows = Object.entries(schema?.properties ?? {}).map(([name, value]) =>
    element(
      "tr",
      "",
      element("td", "", element("code", "", name), required.has(name) ? " (required)" : ""),
      element("td", "", typeName(value)),
      element("td", "", value.default === undefined ? "" : JSON.stringify(value.default)),
      element("td", "text", value.description ?? ""),
    ),
  );
  if (!rows.length) return element("span", "");
  const head = element("tr", "", ...["field", "type", "default", ""].map((name) => element("th", "", name)));
  return element("table", "", element("thead", "", head), element("tbody", "", ...rows));
}

function link(name) {
  const made = element("a", "", name);
  made.href = `#schema-${encodeURIComponent(name)}`;
  return made;
}

function literal(value) {
  return element("code", "", JSON.stringify(value));
}

function joined(parts, word) {
  return element("span", "", ...parts.flatMap((part, index) => (index ? [word, part] : [part])));
}

function bounds(schema) {
  const said = [
    ["at least", schema.minimum ?? schema.minLength ?? schema.minItems],
    ["more than", schema.exclusiveMinimum],
    ["at most", schema.maximum ?? schema.maxLength ?? schema.maxItems],
    ["less than", schema.exclusiveMaximum],
  ].filter(([, bound]) => bound !== undefined);
  return said.length ? ` (${said.map(([word, bound]) => `${word} ${bound}`).join(", ")})` : "";
}

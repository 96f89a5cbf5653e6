// Shows JSON Schemas as tables of fields. Text of the document is only ever set as text.

const REF = "#/components/schemas/";

export function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// What stands in backticks is code.
export function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

export class Schemas {
  constructor(components) {
    this.components = components;
  }

  // The type in words, without what `rules` says.
  typeOf(schema) {
    if (schema.$ref) return schema.$ref.slice(REF.length);
    if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
    if (schema.anyOf) return schema.anyOf.map((each) => this.typeOf(each)).join(" | ");
    if (schema.type === "array") {
      const item = schema.items ? this.typeOf(schema.items) : "anything";
      return `list of ${item.includes(" | ") ? `(${item})` : item}`;
    }
    if (schema.type === "object" && schema.additionalProperties?.constructor === Object) {
      return `object of ${this.typeOf(schema.additionalProperties)}`;
    }
    return schema.type ?? "anything";
  }

  // What the parts of a type say of themselves: bounds, in words where there are words.
  rules(schema) {
    const found = (schema.anyOf ?? []).flatMap((each) => [each.description ?? bounds(each)]);
    if (schema.description === undefined) found.push(bounds(schema));
    if (schema.items?.description) found.push(`each ${schema.items.description}`);
    return [...new Set(found.filter(Boolean))].join("; ");
  }

  // The names of all schemas that a schema refers to, without those within them.
  refs(schema) {
    if (schema === null || typeof schema !== "object") return [];
    if (schema.$ref) return [schema.$ref.slice(REF.length)];
    const parts = Array.isArray(schema) ? schema : Object.entries(schema)
      .filter(([name]) => name !== "discriminator").map(([, value]) => value);
    return [...new Set(parts.flatMap((each) => this.refs(each)))];
  }

  // A schema that is opened shows its fields; they are made then, as schemas may be recursive.
  closed(name, label = "") {
    const summary = element("summary", {}, label, element("span", { class: "type" }, name));
    const details = element("details", {}, summary);
    details.addEventListener("toggle", () => details.append(...this.open(name)), { once: true });
    return details;
  }

  open(name) {
    const schema = this.components[name];
    const needed = new Set(schema.required ?? []);
    const fields = Object.entries(schema.properties ?? {});
    const ordered = [true, false].flatMap((isNeeded) =>
      fields.filter(([field]) => needed.has(field) === isNeeded),
    );
    const rows = ordered.map(([field, type]) => this.row(field, type, needed.has(field)));
    const about = schema.description ? [element("p", {}, ...prose(schema.description))] : [];
    return [...about, element("div", { class: "scroll" }, element("table", {}, ...rows))];
  }

  row(field, schema, isNeeded) {
    const name = element("td", { class: "name" }, field);
    if (isNeeded) name.append(" ", element("span", { class: "needed", title: "required" }, "*"));
    const about = element("td", {}, element("div", { class: "type" }, this.typeOf(schema)));
    const rules = this.rules(schema);
    if (schema.description) about.append(element("div", {}, ...prose(schema.description)));
    if (rules) about.append(element("div", { class: "dim" }, ...prose(rules)));
    if ("default" in schema) {
      about.append(element("div", { class: "dim" }, `default: ${JSON.stringify(schema.default)}`));
    }
    about.append(...this.refs(schema).map((each) => this.closed(each)));
    return element("tr", {}, name, about);
  }
}

function bounds(schema) {
  const words = {
    minimum: "at least", exclusiveMinimum: "more than", maximum: "at most", exclusiveMaximum: "less than",
    minLength: "characters, at least", maxLength: "characters, at most",
    minItems: "items, at least", maxItems: "items, at most", maxProperties: "fields, at most",
  };
  return Object.entries(words).filter(([name]) => name in schema)
    .map(([name, text]) => `${text} ${schema[name]}`).join(", ");
}

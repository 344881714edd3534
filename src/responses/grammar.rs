//! The grammar of a custom tool's input, for engines that bind no call to one: vLLM refuses a request that has one. The
//! model reads it in the tool's description instead, and nothing enforces it. Pure.

use super::known_json;
use super::members::{Members, put, put_comma, put_read, quoted};

/// The list of tools with each grammar in the description of its tool; `None` if no tool has one.
pub(super) fn described(tools: &str) -> Option<String> {
    // Most lists have none, and are not read.
    if !tools.contains("\"grammar\"") {
        return None;
    }
    list(tools, true)
}

/// `has_namespaces`: whether tools in namespaces count as well. A namespace has none within it.
fn list(tools: &str, has_namespaces: bool) -> Option<String> {
    let mut out = vec![b'['];
    let mut has_grammar = false;
    for raw in known_json::values(tools)? {
        put_comma(&mut out);
        let tool = rewritten(raw, has_namespaces);
        has_grammar |= tool.is_some();
        out.extend_from_slice(tool.as_deref().unwrap_or(raw).as_bytes());
    }
    out.push(b']');
    let list = String::from_utf8(out).unwrap_or_default();
    has_grammar.then_some(list)
}

/// A custom tool with a grammar, or a namespace with such a tool, as engines take it; `None` for any other tool.
fn rewritten(raw: &str, has_namespaces: bool) -> Option<String> {
    let tool = Members::parse(raw).ok()?;
    let (left_out, name, value) = match &*tool.text("type")? {
        "custom" => ("format", "description", quoted(&description(&tool)?)),
        "namespace" if has_namespaces => ("", "tools", list(tool.get("tools")?, false)?),
        _ => return None,
    };
    let mut out = vec![b'{'];
    for (known, written) in tool.iter() {
        if known != left_out && known != name {
            put_read(&mut out, known, written);
        }
    }
    put(&mut out, name, &value);
    out.push(b'}');
    Some(String::from_utf8(out).unwrap_or_default())
}

/// The description of a custom tool with the grammar of its input; `None` without a grammar.
fn description(tool: &Members<'_>) -> Option<String> {
    let format = Members::parse(tool.get("format")?).ok()?;
    if format.get("type") != Some("\"grammar\"") {
        return None;
    }
    let description = tool.text("description").unwrap_or_default();
    let syntax = format.text("syntax").unwrap_or_default();
    let definition = format.text("definition").unwrap_or_default();
    let space = if description.is_empty() { "" } else { "\n\n" };
    Some(format!(
        "{description}{space}`input` must match this grammar ({syntax}):\n{definition}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn grammar() -> Value {
        json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\"\n"})
    }

    fn found(tools: &Value) -> Option<Value> {
        let described = described(&tools.to_string())?;
        Some(serde_json::from_str(&described).unwrap())
    }

    #[test]
    fn the_grammar_of_a_custom_tool_is_in_its_description() {
        let tool = |description: Value| {
            let tool = json!({"type": "custom", "name": "apply_patch", "description": description, "format": grammar()});
            found(&json!([{"type": "function", "name": "f"}, tool])).unwrap()
        };
        let text = "`input` must match this grammar (lark):\nstart: \"a\"\n";
        assert_eq!(
            tool(json!("Edits \"files\".")),
            json!([{"type": "function", "name": "f"},
                {"type": "custom", "name": "apply_patch", "description": format!("Edits \"files\".\n\n{text}")}])
        );
        assert_eq!(tool(Value::Null)[1]["description"], text);
    }

    #[test]
    fn the_grammar_of_a_tool_in_a_namespace_is_in_its_description() {
        let inner = json!({"type": "custom", "name": "exec", "format": grammar()});
        let space = json!({"type": "namespace", "name": "ns", "tools": [inner]});
        let tools = found(&json!([space])).unwrap();
        assert_eq!(tools[0]["name"], "ns");
        assert_eq!(tools[0]["tools"][0].get("format"), None);
        assert!(tools[0]["tools"][0]["description"].is_string(), "{tools}");
    }

    #[test]
    fn other_tools_stay_as_they_are() {
        for tools in [
            json!([]),
            json!([{"type": "custom", "name": "c", "format": {"type": "text"}}]),
            json!([{"type": "function", "name": "grammar", "description": "\"grammar\""}]),
            json!([{"type": "namespace", "name": "ns", "tools": [{"type": "namespace", "name": "ns", "tools": [
                {"type": "custom", "name": "c", "format": grammar()}]}]}]),
        ] {
            assert_eq!(found(&tools), None, "{tools}");
        }
    }
}

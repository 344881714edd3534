//! Items of type `additional_tools`, in which newer clients list tools within the input. Engines know only the tools of
//! the body, so those of the items are put there. Pure.

use std::collections::HashSet;

use memchr::memmem;

use super::known_json;
use super::members::{Members, array, put_comma};

/// How each such item begins in a list for engines. Within a text the quotes would be escaped.
const BEGINNING: &str = r#"{"type":"additional_tools""#;

/// What a list of items for engines becomes.
pub(super) struct Separated {
    /// The other items.
    pub(super) input: Vec<u8>,
    /// The tools of the body and those of the items: a list.
    pub(super) tools: String,
}

/// Takes the items that list tools out of `input`. `tools`: those of the body. `None` if there is no such item.
pub(super) fn separated(tools: Option<&str>, input: &[u8]) -> Option<Separated> {
    memmem::find(input, BEGINNING.as_bytes())?;
    let text = std::str::from_utf8(input).ok()?;
    let mut all = tools.and_then(known_json::list).unwrap_or_default();
    // The same list may come with each turn of a conversation.
    let mut known: HashSet<&str> = all.iter().copied().collect();
    let mut others = vec![b'['];
    let mut is_found = false;
    for raw in known_json::values(text)? {
        if !raw.starts_with(BEGINNING) {
            put_comma(&mut others);
            others.extend_from_slice(raw.as_bytes());
            continue;
        }
        is_found = true;
        let item = Members::parse(raw).unwrap_or_default();
        let more = item.get("tools").and_then(known_json::list);
        for tool in more.unwrap_or_default() {
            if known.insert(tool) {
                all.push(tool);
            }
        }
    }
    others.push(b']');
    let list = array(all.iter().map(|tool| tool.as_bytes()));
    is_found.then(|| Separated {
        input: others,
        tools: String::from_utf8(list).unwrap_or_default(),
    })
}

/// Whether a list for engines has nothing that a model reads: no item, or only such that list tools.
pub(super) fn has_no_prompt(input: &[u8]) -> bool {
    let items = std::str::from_utf8(input).ok().and_then(known_json::values);
    items.is_some_and(|mut items| items.all(|raw| raw.starts_with(BEGINNING)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tools: Option<&str>, input: &str, expected: Option<(&str, &str)>) {
        let found = separated(tools, input.as_bytes());
        let found = found.map(|found| (String::from_utf8(found.input).unwrap(), found.tools));
        let expected = expected.map(|(input, tools)| (input.to_owned(), tools.to_owned()));
        assert_eq!(found, expected, "{input}");
    }

    #[test]
    fn tools_of_items_follow_those_of_the_body_each_once() {
        let item = r#"{"type":"additional_tools","role":"developer","tools":[{"type":"function","name":"f"},{"type":"custom","name":"c"}]}"#;
        let both = r#"[{"type":"function","name":"f"},{"type":"custom","name":"c"}]"#;
        check(
            None,
            &format!(r#"[{item},{{"type":"message"}}]"#),
            Some((r#"[{"type":"message"}]"#, both)),
        );
        check(
            Some(r#"[{"type":"function","name":"g"},{"type":"function","name":"f"}]"#),
            &format!(r#"[{{"type":"message"}},{item},{item}]"#),
            Some((
                r#"[{"type":"message"}]"#,
                r#"[{"type":"function","name":"g"},{"type":"function","name":"f"},{"type":"custom","name":"c"}]"#,
            )),
        );
        check(None, &format!("[{item}]"), Some(("[]", both)));
    }

    #[test]
    fn a_list_of_tools_alone_is_no_prompt() {
        let tools = r#"{"type":"additional_tools","role":"developer","tools":[]}"#;
        let message = r#"{"type":"message","role":"user","content":"x"}"#;
        for (items, expected) in [
            ("", true),
            (tools, true),
            (&*format!("{tools},{tools}"), true),
            (message, false),
            (&*format!("{tools},{message}"), false),
        ] {
            let found = has_no_prompt(format!("[{items}]").as_bytes());
            assert_eq!(found, expected, "{items}");
        }
    }

    #[test]
    fn an_input_without_such_an_item_stays_as_it_is() {
        for input in [
            "[]",
            r#"[{"type":"message","content":"{\"type\":\"additional_tools\"}"}]"#,
            r#"[{"type":"message","content":[{"type":"additional_tools","tools":[{}]}]}]"#,
        ] {
            check(Some("[]"), input, None);
        }
    }
}

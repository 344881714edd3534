//! A `tool_choice` of type `allowed_tools`: no engine acts on its list, so the calls of an answer are held to it. Pure.

use std::borrow::Cow;
use std::sync::Arc;

use super::known_json;
use super::members::Members;

/// The tools that may be called.
#[derive(Clone, Debug)]
pub(super) struct AllowedTools {
    /// As models see them.
    names: Arc<[String]>,
}

impl AllowedTools {
    /// `None` if every tool may be called.
    pub(super) fn of(choice: Option<&str>) -> Option<Self> {
        let choice = Members::parse(choice?).ok()?;
        if choice.get("type") != Some("\"allowed_tools\"") {
            return None;
        }
        let tools = choice.get("tools").and_then(known_json::objects)?;
        let names = tools.map(|tool| Some(name(&tool?)));
        Some(Self {
            names: names.collect::<Option<_>>()?,
        })
    }

    /// Why an item of an answer fails its response: it calls a tool that is not listed.
    pub(super) fn check(&self, item: &str) -> Result<(), String> {
        let item = Members::parse(item).unwrap_or_default();
        let (Some("\"function_call\"" | "\"custom_tool_call\""), Some(_)) =
            (item.get("type"), item.get("name"))
        else {
            return Ok(());
        };
        self.check_name(&name(&item))
    }

    /// As [`AllowedTools::check`], of a call by the name of its tool as models see it. An empty name is not complete.
    pub(super) fn check_name(&self, name: &str) -> Result<(), String> {
        if name.is_empty() || self.names.iter().any(|allowed| allowed == name) {
            Ok(())
        } else {
            Err(format!(
                "the model called '{name}', which `tool_choice` does not allow"
            ))
        }
    }
}

fn name(tool: &Members<'_>) -> String {
    let name = tool.text("name").unwrap_or_default();
    let namespace = tool.text("namespace").unwrap_or_default();
    qualified(&namespace, &name).into_owned()
}

/// The name of a tool in a namespace, as models see it.
pub(super) fn qualified<'a>(namespace: &str, name: &'a str) -> Cow<'a, str> {
    match namespace {
        "" => Cow::Borrowed(name),
        namespace => Cow::Owned(format!("{namespace}__{name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_of_listed_tools_pass() {
        let choice = r#"{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"f"},{"type":"function","name":"g","namespace":"n"},{"type":"mcp","server_label":"s"}]}"#;
        let allowed = AllowedTools::of(Some(choice)).unwrap();
        let check = |item: &str, passes: bool| {
            assert_eq!(allowed.check(item).is_ok(), passes, "{item}");
        };
        check(r#"{"type":"function_call","name":"f"}"#, true);
        check(r#"{"type":"custom_tool_call","name":"f"}"#, true);
        check(
            r#"{"type":"function_call","name":"g","namespace":"n"}"#,
            true,
        );
        check(r#"{"type":"function_call","name":"n__g"}"#, true);
        check(r#"{"type":"function_call","name":"g"}"#, false);
        check(r#"{"type":"custom_tool_call","name":"h"}"#, false);
        check(r#"{"type":"message","name":"h"}"#, true);
        // The name comes with the end of the item.
        check(r#"{"type":"function_call","name":""}"#, true);
        check(r#"{"type":"function_call"}"#, true);
        let why = allowed.check(r#"{"type":"function_call","name":"h"}"#);
        assert_eq!(
            why.unwrap_err(),
            "the model called 'h', which `tool_choice` does not allow"
        );
    }

    #[test]
    fn other_choices_allow_every_tool() {
        for choice in [
            None,
            Some("\"auto\""),
            Some(r#"{"type":"function","name":"f"}"#),
        ] {
            assert!(AllowedTools::of(choice).is_none(), "{choice:?}");
        }
        let none = r#"{"type":"allowed_tools","mode":"auto","tools":[]}"#;
        let none = AllowedTools::of(Some(none)).unwrap();
        assert!(
            none.check(r#"{"type":"function_call","name":"f"}"#)
                .is_err()
        );
    }
}

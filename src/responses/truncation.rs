//! `truncation: auto`: what of a list of items is left out if it is too long for the model. Pure.

use std::collections::HashSet;

use super::item::{Item, Kind, call_id};
use super::members;

/// What of an item decides whether it is dropped. Items with all their members take several times the text.
struct RoleAndCall<'a> {
    /// As written, or empty.
    role: &'a str,
    /// What it shares with its other half, if it is a call or the output of one.
    call: Option<&'a str>,
}

impl<'a> RoleAndCall<'a> {
    fn read(raw: &'a str) -> Option<Self> {
        let item = Item::read(raw, "input").ok()?;
        Some(Self {
            role: item.members.get("role").unwrap_or_default(),
            call: pair(&item),
        })
    }
}

/// Drops the older half of what may be dropped; `None` if that is nothing.
///
/// System and developer messages stay, the last user message and the last item. What follows the last user message is
/// only touched once nothing before it is left, as in an agent's long loop. A call is dropped together with its output.
pub(super) fn shortened(list: &[u8]) -> Option<Vec<u8>> {
    let items = members::list_of(list)?;
    let read: Vec<RoleAndCall<'_>> = items
        .iter()
        .map(|raw| RoleAndCall::read(raw))
        .collect::<Option<_>>()?;
    let role = |index: usize| read[index].role;
    let last_user = (0..read.len()).rfind(|index| role(*index) == "\"user\"")?;
    let kept_call = read.last()?.call;
    let is_droppable = |index: &usize| {
        !matches!(role(*index), "\"system\"" | "\"developer\"")
            && kept_call.is_none_or(|kept| read[*index].call != Some(kept))
    };
    let mut old: Vec<usize> = (0..last_user).filter(is_droppable).collect();
    if old.is_empty() {
        let before_last = last_user + 1..read.len().max(1) - 1;
        old = before_last.filter(is_droppable).collect();
    }
    old.truncate(old.len().div_ceil(2));
    let calls: HashSet<&str> = old.iter().filter_map(|index| read[*index].call).collect();
    let is_dropped = |index: &usize| {
        old.binary_search(index).is_ok()
            || read[*index].call.is_some_and(|call| calls.contains(call))
    };
    if old.is_empty() {
        return None;
    }
    let kept = (0..read.len()).filter(|index| !is_dropped(index));
    Some(members::array(kept.map(|index| items[index].as_bytes())))
}

/// What a call and its output share; `None` for other items.
fn pair<'a>(item: &Item<'a>) -> Option<&'a str> {
    matches!(
        item.kind,
        Kind::FunctionCall
            | Kind::FunctionCallOutput
            | Kind::CustomToolCall
            | Kind::CustomToolCallOutput
    )
    .then(|| call_id(item))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// `s`, `d`, `u`, `a`: a message of that role; `r`: reasoning; a digit: a call; the digit after `=`: its output.
    fn items(text: &str) -> Vec<Value> {
        let mut items = Vec::new();
        let mut is_output = false;
        for (place, name) in text.chars().enumerate() {
            let message = |role: &str| json!({"role": role, "content": format!("{place}")});
            items.push(match name {
                '=' => {
                    is_output = true;
                    continue;
                }
                's' => message("system"),
                'd' => message("developer"),
                'u' => message("user"),
                'a' => message("assistant"),
                'r' => json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": format!("{place}")}]}),
                call if is_output => {
                    json!({"type": "function_call_output", "call_id": call.to_string(), "output": "x"})
                }
                call => {
                    json!({"type": "function_call", "call_id": call.to_string(), "name": "f", "arguments": "{}"})
                }
            });
            is_output = false;
        }
        items
    }

    fn short(items: &[Value]) -> Option<Vec<Value>> {
        let list = serde_json::to_vec(items).unwrap();
        Some(serde_json::from_slice(&shortened(&list)?).unwrap())
    }

    fn check(list: &str, kept: Option<&[usize]>) {
        let items = items(list);
        let expected = kept.map(|kept| kept.iter().map(|at| items[*at].clone()).collect());
        assert_eq!(short(&items), expected, "{list}");
    }

    #[test]
    fn the_older_half_goes_and_the_instructions_and_the_last_message_stay() {
        check("u", None);
        check("sdu", None);
        check("au", Some(&[1]));
        check("suauau", Some(&[0, 3, 4, 5]));
        check("uaduau", Some(&[2, 3, 4, 5]));
        check("a", None);
    }

    #[test]
    fn a_call_goes_with_its_output_wherever_that_is() {
        check("1=1u", Some(&[2]));
        check("1a=1u", Some(&[3]));
        // The output that the model is to read.
        check("1u=1", None);
        check("a1u=1", Some(&[1, 2, 3]));
    }

    #[test]
    fn the_loop_of_an_agent_loses_its_oldest_calls() {
        check("u1=12=23=3", Some(&[0, 3, 4, 5, 6]));
        check("u1=1", None);
        check("u1=12=2", Some(&[0, 3, 4]));
        check("ur1=1r2=2", Some(&[0, 4, 5, 6]));
    }

    proptest! {
        #[test]
        fn what_is_left_is_shorter_whole_and_has_what_must_stay(list in "[sduar]{0,6}(r?(1|=1|2|=2|3|=3|a|u)){0,12}") {
            let before = items(&list);
            let Some(after) = short(&before) else { return Ok(()) };
            prop_assert!(after.len() < before.len());
            let mut rest = before.iter();
            prop_assert!(after.iter().all(|item| rest.any(|other| other == item)), "not in order");
            prop_assert_eq!(after.last(), before.last());
            let role = |item: &Value| item["role"].as_str().unwrap_or_default().to_owned();
            let kept = |item: &&Value| ["system", "developer"].contains(&&*role(item));
            prop_assert_eq!(after.iter().filter(kept).count(), before.iter().filter(kept).count());
            let user = |items: &[Value]| items.iter().rfind(|item| role(item) == "user").cloned();
            prop_assert_eq!(user(&after), user(&before));
            for item in &before {
                let call = &item["call_id"];
                let of_call = |items: &[Value]| items.iter().filter(|other| other["call_id"] == *call).count();
                let (left, all) = (of_call(&after), of_call(&before));
                prop_assert!(call.is_null() || left == 0 || left == all, "torn: {call}");
            }
        }
    }
}

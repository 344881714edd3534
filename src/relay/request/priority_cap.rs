//! A body asks its engine for no earlier place than its tenant may have. Pure.

use super::body_edit::Edit;
use crate::prompt::PeekedBody;

/// The edit of a body whose `priority` is earlier than `max`, as vLLM reads it: lower is earlier, and a request that names
/// none has 0.
pub(in crate::relay) fn cap(body: &[u8], peek: &PeekedBody<'_>, max: i32) -> Option<Edit> {
    let json = peek.priority_json.filter(|json| *json != "null")?;
    let earliest = -i64::from(max.max(0));
    let capped = match peek.priority {
        Some(priority) if priority >= earliest => return None,
        Some(_) => earliest,
        // Engines may read it as a number, such as `"-5"` and `-5.0`.
        None => 0,
    };
    Edit::of_value(body, json, capped.to_string())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::prompt::{self, Api};
    use crate::relay::request::body_edit::applied;

    fn check(max: i32, asked: &str, expected: &str) {
        let text = |priority: &str| format!(r#"{{"priority": {priority} ,"n":1}}"#);
        let body = Bytes::from(text(asked));
        let peek = prompt::peek(Api::Chat, &body, 64).unwrap();
        let mut edits: Vec<Edit> = cap(&body, &peek, max).into_iter().collect();
        assert_eq!(applied(&body, &mut edits), text(expected), "{max}, {asked}");
    }

    #[test]
    fn an_earlier_place_becomes_the_earliest_that_a_tenant_may_have() {
        check(5, "-9", "-5");
        check(5, "-5", "-5");
        check(5, "9", "9");
        check(0, "-1", "0");
        check(i32::MAX, "-9223372036854775808", "-2147483647");
        // A request that names no priority has 0, too.
        check(-3, "0", "0");
        check(-3, "-1", "0");
    }

    #[test]
    fn what_an_engine_may_read_as_a_number_becomes_none_that_is_early() {
        for odd in ["\"-9\"", "-9.0", "-9e1", "-99999999999999999999", "[]"] {
            check(5, odd, "0");
        }
        check(5, "null", "null");
        // Engines take the last one.
        check(5, r#"1,"priority":-9"#, r#"1,"priority":-5"#);
    }
}

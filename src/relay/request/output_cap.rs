//! A request that does not say how long its answer may be gets the most that its tenant may ask for. Pure.

use super::body_edit::Edit;
use crate::prompt::{Api, PeekedBody};

/// OpenAI's default of completions, which engines have too.
const COMPLETION_TOKENS: u64 = 16;

/// The number of output tokens that a request gets, and the edit of its body. `None` if it says a number itself, or
/// generates nothing.
pub(in crate::relay) fn cap(
    api: Api,
    body: &[u8],
    peek: &PeekedBody<'_>,
    max: u64,
) -> Option<(u64, Edit)> {
    if peek.odd_value.is_some() || (peek.max_tokens.is_some() && peek.no_max_tokens.is_none()) {
        return None;
    }
    // Of a number and a `null`, also under one name, it depends on the engine which counts.
    let max = peek.max_tokens.map_or(max, |asked| asked.min(max));
    let (name, max) = match (api, peek.no_max_tokens) {
        (Api::Completions, None) => ("max_tokens", max.min(COMPLETION_TOKENS)),
        // Every engine has this name, besides `max_completion_tokens`.
        (Api::Chat | Api::Completions | Api::Generate, _) => ("max_tokens", max),
        (Api::Responses, _) => ("max_output_tokens", max),
        _ => return None,
    };
    let edit = match (peek.no_max_tokens, peek.sampling_params) {
        (Some(null), _) => Edit::of_value(body, null, max.to_string()),
        (None, Some(params)) => Edit::first_field(body, params.as_bytes(), name, &max.to_string()),
        (None, None) => Edit::last_field(body, name, &max.to_string()),
    };
    Some((max, edit?))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::prompt;
    use crate::relay::request::body_edit::applied;

    fn check(api: Api, body: &str, expected: Option<&str>) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let peek = prompt::peek(api, &body, 64).unwrap();
        let capped = cap(api, &body, &peek, 100);
        let capped = capped.map(|(_, edit)| applied(&body, &mut [edit]));
        let capped = capped
            .as_deref()
            .map(|bytes| str::from_utf8(bytes).unwrap());
        assert_eq!(capped, expected, "{body:?}");
    }

    #[test]
    fn a_request_that_asks_for_no_number_gets_the_most_that_it_may() {
        check(Api::Chat, r#"{"n":1}"#, Some(r#"{"n":1,"max_tokens":100}"#));
        check(
            Api::Responses,
            r#"{"input":"a"}"#,
            Some(r#"{"input":"a","max_output_tokens":100}"#),
        );
        check(
            Api::Chat,
            r#"{"max_completion_tokens": null ,"n":1}"#,
            Some(r#"{"max_completion_tokens": 100 ,"n":1}"#),
        );
        // What it says is checked, and not changed.
        check(Api::Chat, r#"{"max_tokens":5}"#, None);
        check(
            Api::Chat,
            r#"{"max_tokens":5,"max_completion_tokens":null}"#,
            Some(r#"{"max_tokens":5,"max_completion_tokens":5}"#),
        );
        check(
            Api::Chat,
            r#"{"max_tokens":5,"max_tokens":null}"#,
            Some(r#"{"max_tokens":5,"max_tokens":5}"#),
        );
        // Engines do not read it there.
        check(
            Api::Chat,
            r#"{"max_output_tokens":5}"#,
            Some(r#"{"max_output_tokens":5,"max_tokens":100}"#),
        );
        check(Api::Chat, r#"{"max_tokens":"5"}"#, None);
        check(Api::Embeddings, r#"{"input":"a"}"#, None);
    }

    #[test]
    fn tokens_in_tokens_out_have_it_among_the_sampling_parameters() {
        let check = |params: &str, expected: Option<&str>| {
            let body =
                |params: &str| format!(r#"{{"token_ids":[1,2],"sampling_params":{params}}}"#);
            check(Api::Generate, &body(params), expected.map(body).as_deref());
        };
        check("{}", Some(r#"{"max_tokens":100}"#));
        check(r#"{"n":2}"#, Some(r#"{"max_tokens":100,"n":2}"#));
        check(r#"{"max_tokens": null}"#, Some(r#"{"max_tokens": 100}"#));
        check(r#"{"max_tokens":5}"#, None);
        check("7", None);
    }

    #[test]
    fn a_completion_keeps_the_default_of_engines() {
        check(
            Api::Completions,
            r#"{"prompt":"a"}"#,
            Some(r#"{"prompt":"a","max_tokens":16}"#),
        );
        // Engines take this for no bound at all.
        check(
            Api::Completions,
            r#"{"prompt":"a","max_tokens":null}"#,
            Some(r#"{"prompt":"a","max_tokens":100}"#),
        );
    }
}

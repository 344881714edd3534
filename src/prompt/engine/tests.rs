use super::request::{has_media, is_supported_by_tokenize};
use super::response::{read_rendered, read_tokenized};
use super::*;

#[test]
fn responses_of_all_endpoints_are_decoded() {
    let check = |answer: &str, expected: Result<Vec<u32>, Error>| {
        assert_eq!(read_rendered(answer.as_bytes()), expected, "{answer}");
    };
    check(
        r#"{"request_id": "r", "token_ids": [1, 2]}"#,
        Ok(vec![1, 2]),
    );
    check(r#"[{"token_ids": [3], "features": null}]"#, Ok(vec![3]));
    check(
        r#"[{"token_ids": [3]}, {"token_ids": [4]}]"#,
        Err(Error::Unsupported),
    );
    check(
        r#"{"token_ids": [3], "features": {"mm_hashes": {}}}"#,
        Err(Error::Unsupported),
    );
    check(r#"{"tokens": [3]}"#, Err(Error::Failed));
    check("<html>", Err(Error::Failed));
    assert_eq!(
        read_tokenized(br#"{"count": 2, "max_model_len": 9, "tokens": [5, 6]}"#),
        Ok(vec![5, 6])
    );
}

#[test]
fn bodies_that_tokenize_would_render_differently_are_unsupported() {
    let check = |api, body: &str, expected| {
        assert_eq!(
            is_supported_by_tokenize(api, body.as_bytes()),
            expected,
            "{body}"
        );
    };
    check(Api::Chat, r#"{"messages": [], "tools": []}"#, true);
    check(
        Api::Chat,
        r#"{"messages": [], "reasoning_effort": null}"#,
        true,
    );
    check(
        Api::Chat,
        r#"{"messages": [], "reasoning_effort": "low"}"#,
        false,
    );
    check(Api::Chat, r#"{"messages": [], "documents": []}"#, false);
    check(Api::Completions, r#"{"prompt": "x"}"#, true);
    check(Api::Completions, r#"{"prompt": ["x"]}"#, false);
    check(Api::Completions, r#"{"prompt": "x", "suffix": "y"}"#, false);
    check(Api::Responses, r#"{"input": "x"}"#, false);
}

#[test]
fn media_are_found_by_their_keys() {
    assert!(has_media(br#"{"type": "image_url"}"#));
    assert!(!has_media(br#"{"type": "text", "text": "an image"}"#));
}

#[test]
fn cached_responses_expire_and_are_bounded() {
    let now = crate::observe::now();
    let age = Duration::from_secs(10);
    let ids: Arc<[u32]> = vec![1; 25].into();
    let mut cache = ResponseCache::default();
    // There is room for two entries.
    for key in 0..3 {
        cache.put(key, now, ids.clone(), 400);
    }
    assert_eq!(cache.get(0, now, age), None);
    assert_eq!(cache.get(1, now, age).as_deref(), Some(&*ids));
    cache.put(3, now, ids.clone(), 400);
    assert_eq!(cache.get(2, now, age), None, "1 was used after it");
    assert_eq!(cache.bytes, 400);
    cache.put(3, now, ids.clone(), 400);
    assert_eq!(cache.bytes, 400);
    assert_eq!(cache.get(3, now + age * 2, age), None);
    assert_eq!(
        cache.bytes, 200,
        "the expired entry is removed, not the newest"
    );
    assert_eq!(cache.entries.len(), 1);
    cache.put(4, now, vec![1; 1_000].into(), 400);
    assert_eq!(cache.get(4, now, age), None);
}

#[test]
fn errors_without_a_call_do_not_count_for_the_circuit_breaker() {
    let settings = Settings {
        max_requests: 1,
        ..Settings::default()
    };
    let engine = EngineTokenizer::new(settings, 1);
    let media = engine.permit(br#"{"type": "image_url"}"#).unwrap_err();
    let taken = engine.permit(b"{}").unwrap();
    let busy = engine.permit(b"{}").unwrap_err();
    assert_eq!((media, busy), (Error::Unsupported, Error::Busy));
    drop(taken);
    assert!(engine.permit(b"{}").is_ok());
    let cases = [
        (Error::Busy, None),
        (Error::Timeout, Some(false)),
        (Error::Failed, Some(false)),
        (Error::Refused, Some(true)),
        (Error::Unsupported, None),
    ];
    for (error, expected) in cases {
        assert_eq!(error.engine_succeeded(), expected, "{error}");
    }
}

#[test]
fn requests_with_the_same_prompt_share_a_cache_key() {
    let key = |body: &str| cache::key(1, "m", Api::Chat, body.as_bytes());
    let first = key(r#"{"messages": [1], "max_tokens": 5, "stream": true}"#);
    assert_eq!(
        first,
        key(r#"{"stream": false, "messages": [1], "user": "u"}"#)
    );
    assert_ne!(first, key(r#"{"messages": [2]}"#));
    assert_ne!(first, key(r#"{"messages": [1], "tools": []}"#));
    assert_ne!(
        first,
        cache::key(1, "other", Api::Chat, br#"{"messages": [1]}"#)
    );
    assert!(cache::IGNORED_FIELDS.is_sorted());
}

#[test]
fn unavailable_render_endpoints_are_tried_again_after_a_minute() {
    let engine = EngineTokenizer::new(Settings::default(), 1);
    let now = crate::observe::now();
    assert!(engine.may_render(now, "a:1"));
    engine.set_render_unavailable(now, "a:1");
    assert!(!engine.may_render(now, "a:1"));
    assert!(engine.may_render(now, "b:1"));
    assert!(engine.may_render(now + RENDER_RETRY_INTERVAL * 2, "a:1"));
}

use super::*;

#[test]
fn the_answers_of_all_endpoints_are_read() {
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
        Err(Error::Unknown),
    );
    check(
        r#"{"token_ids": [3], "features": {"mm_hashes": {}}}"#,
        Err(Error::Unknown),
    );
    check(r#"{"tokens": [3]}"#, Err(Error::Failed));
    check("<html>", Err(Error::Failed));
    assert_eq!(
        read_tokenized(br#"{"count": 2, "max_model_len": 9, "tokens": [5, 6]}"#),
        Ok(vec![5, 6])
    );
}

#[test]
fn a_body_with_what_tokenize_does_not_know_is_not_asked_for_there() {
    let check = |api, body: &str, expected| {
        assert_eq!(
            is_told_by_tokenize(api, body.as_bytes()),
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
fn media_are_seen() {
    assert!(has_media(br#"{"type": "image_url"}"#));
    assert!(!has_media(br#"{"type": "text", "text": "an image"}"#));
}

#[test]
fn what_is_kept_grows_old_and_is_bounded() {
    let now = crate::observe::now();
    let age = Duration::from_secs(10);
    let ids: Arc<[u32]> = vec![1; 25].into();
    let mut kept = Kept::default();
    // Room for two.
    for key in 0..3 {
        kept.put(key, now, ids.clone(), 400);
    }
    assert_eq!(kept.get(0, now, age), None);
    assert_eq!(kept.get(1, now, age).as_deref(), Some(&*ids));
    kept.put(3, now, ids.clone(), 400);
    assert_eq!(kept.get(2, now, age), None, "1 was used after it");
    assert_eq!(kept.bytes, 400);
    kept.put(3, now, ids.clone(), 400);
    assert_eq!(kept.bytes, 400);
    assert_eq!(kept.get(3, now + age * 2, age), None);
    assert_eq!(
        kept.bytes, 200,
        "what is too old is gone, and not the newest"
    );
    assert_eq!(kept.answers.len(), 1);
    kept.put(4, now, vec![1; 1_000].into(), 400);
    assert_eq!(kept.get(4, now, age), None);
}

#[test]
fn what_was_not_asked_of_a_worker_says_nothing_of_it() {
    let settings = Settings {
        max_requests: 1,
        ..Settings::default()
    };
    let engine = Engine::new(settings, 1);
    let media = engine.slot(br#"{"type": "image_url"}"#).unwrap_err();
    let taken = engine.slot(b"{}").unwrap();
    let busy = engine.slot(b"{}").unwrap_err();
    assert_eq!((media, busy), (Error::Unknown, Error::Busy));
    drop(taken);
    assert!(engine.slot(b"{}").is_ok());
    let said = [
        (Error::Busy, None),
        (Error::Late, Some(false)),
        (Error::Failed, Some(false)),
        (Error::Refused, Some(true)),
        (Error::Unknown, None),
    ];
    for (error, expected) in said {
        assert_eq!(error.is_well(), expected, "{error}");
    }
}

#[test]
fn bodies_of_one_prompt_share_an_answer() {
    let engine = Engine::new(Settings::default(), 1);
    let key = |body: &str| engine.key("m", Api::Chat, body.as_bytes());
    let first = key(r#"{"messages": [1], "max_tokens": 5, "stream": true}"#);
    assert_eq!(
        first,
        key(r#"{"stream": false, "messages": [1], "user": "u"}"#)
    );
    assert_ne!(first, key(r#"{"messages": [2]}"#));
    assert_ne!(first, key(r#"{"messages": [1], "tools": []}"#));
    assert_ne!(
        first,
        engine.key("other", Api::Chat, br#"{"messages": [1]}"#)
    );
    assert!(NOT_OF_THE_PROMPT.is_sorted());
}

#[test]
fn a_worker_that_refuses_to_render_is_asked_again_after_a_while() {
    let engine = Engine::new(Settings::default(), 1);
    let now = crate::observe::now();
    assert!(engine.renders(now, "a:1"));
    engine.set_without_render(now, "a:1");
    assert!(!engine.renders(now, "a:1"));
    assert!(engine.renders(now, "b:1"));
    assert!(engine.renders(now + WITHOUT_RENDER * 2, "a:1"));
}

//! A stream that one process begins and another one goes on with.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::json;

use super::super::{Progress, Reader, Request, Resume};
use super::engine::Engine;
use super::{body, read, settings};
use crate::http::sse::Aligner;
use crate::prompt::Api;

/// Plays a chat. Each process dies after so many bytes of its worker's stream, in 1000; what it passed is kept, with the
/// tokens. The reason if a process cannot go on.
fn play(
    body: &serde_json::Value,
    engine: Engine,
    deaths: &[usize],
    piece: usize,
) -> Result<String, &'static str> {
    let read = || Request::read(Api::Chat, &body.to_string().into()).unwrap();
    let request = read();
    let (mut text, mut parts) = (Vec::new(), Vec::new());
    let mut sent = request.body.clone();
    let mut reader = Reader::new(settings(100), request, 3);
    let mut progress = Arc::new(Progress::default());
    let mut deaths = deaths.iter();
    loop {
        reader.report_to(progress.clone(), "m");
        let stream = engine.stream(Api::Chat, &sent);
        let death = deaths.next().map(|death| death * stream.len() / 1000);
        let stream = &stream.as_bytes()[..death.unwrap_or(stream.len())];
        let mut aligner = Aligner::new(1 << 20);
        for piece in stream.chunks(piece.max(1)) {
            let (passed, _) = reader.on_events(aligner.push(Bytes::copy_from_slice(piece)));
            text.extend_from_slice(&passed);
            parts.push(progress.take().0);
        }
        if text.ends_with(b"data: [DONE]\n\n") {
            return Ok(String::from_utf8(text).unwrap());
        }
        let resume = Resume::read(parts.iter().map(Vec::as_slice))?;
        assert!(resume.is_of("m"));
        progress = Arc::new(Progress::default());
        progress.resume(&resume);
        let resumed = Reader::resumed(settings(100), read(), &resume);
        (reader, sent) = resumed.map_err(|refusal| refusal.as_str())?;
    }
}

#[test]
fn a_process_goes_on_wherever_the_last_one_died() {
    let mut body = body(Api::Chat, 30);
    body["stream_options"] = json!({"include_usage": true});
    for engine in [Engine { reasons: true }, Engine::default()] {
        let whole = read(&play(&body, engine, &[], 1_000).unwrap());
        for death in 0..1_000 {
            let found = match play(&body, engine, &[death], 100) {
                Ok(text) => read_as(&text, &whole),
                // No text yet, or all of it.
                Err(reason) => {
                    assert!(["not_stored", "finished"].contains(&reason), "{reason}");
                    assert!(!(200..900).contains(&death), "{death}: {reason}");
                    continue;
                }
            };
            assert_eq!(found, whole, "{death}");
        }
    }
}

/// The answer, without what a response over chat does not show: the chunks' id, and the cached tokens that the router
/// expected.
fn read_as(text: &str, whole: &super::Answer) -> super::Answer {
    // Each process has an id of its own.
    let answers = text.split_inclusive("\n\n").map(read);
    let mut all = super::Answer {
        id: whole.id.clone(),
        ..super::Answer::default()
    };
    for answer in answers {
        all.roles += answer.roles;
        all.reasoning += &answer.reasoning;
        all.text += &answer.text;
        all.finish.extend(answer.finish);
        all.usage.extend(answer.usage);
        all.ends += answer.ends;
    }
    for usage in &mut all.usage {
        usage["prompt_tokens_details"]["cached_tokens"] = json!(0);
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn many_processes_write_the_text_of_one(
        max_tokens in 1usize..60,
        deaths in proptest::collection::vec(0usize..1_000, 0..6),
        piece in 1usize..400,
        reasons in any::<bool>(),
    ) {
        let mut body = body(Api::Chat, max_tokens);
        body["stream_options"] = json!({"include_usage": true});
        let engine = Engine { reasons };
        let whole = read(&play(&body, engine, &[], 1_000).unwrap());
        if let Ok(text) = play(&body, engine, &deaths, piece) {
            prop_assert_eq!(read_as(&text, &whole), whole);
        }
    }
}

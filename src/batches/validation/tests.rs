use proptest::prelude::*;

use super::*;
use crate::batches::shards;

const CHAT: LineEndpoint = LineEndpoint::ChatCompletions;

fn line(id: &str, model: &str) -> String {
    format!(
        r#"{{"custom_id":"{id}","method":"POST","url":"/v1/chat/completions","body":{{"model":"{model}"}}}}"#
    )
}

fn refusal(model: &str) -> Option<(String, String)> {
    let message = || format!("no worker serves {model}");
    (model == "unknown").then(|| ("model_not_found".to_owned(), message()))
}

fn validator(
    flavor: Flavor,
    max_lines: u32,
) -> Validator<impl FnMut(&str) -> Option<(String, String)>> {
    Validator::new(CHAT, flavor, max_lines, refusal)
}

fn validate(text: &str) -> Result<Plan, Vec<LineError>> {
    let mut validator = validator(Flavor::OpenAi, 1_000);
    validator.push(text.as_bytes());
    validator.finish()
}

/// The code and the line number of each error.
fn errors_of(result: Result<Plan, Vec<LineError>>) -> Vec<(String, Option<u32>)> {
    let errors = result.unwrap_err().into_iter();
    errors.map(|error| (error.code, error.line)).collect()
}

fn check(text: &str, expected: &[(&str, Option<u32>)]) {
    let errors = errors_of(validate(text));
    let found: Vec<_> = errors
        .iter()
        .map(|(code, line)| (code.as_str(), *line))
        .collect();
    assert_eq!(found, expected, "{text}");
}

#[test]
fn a_plan_has_the_model_if_all_lines_have_the_same() {
    let model = |other: &str| {
        let text = [line("a", "m"), line("b", other)].join("\n");
        validate(&text).unwrap().model
    };
    assert_eq!(model("m").as_deref(), Some("m"));
    assert_eq!(model("n"), None);
}

#[test]
fn tokens_are_those_of_prompts_and_the_output_that_lines_name() {
    for (body, expected) in [
        ("", 0),
        (r#","messages":"0123456789""#, 3),
        (r#","tools":"012345","messages":"012345""#, 4),
        (r#","max_tokens":7"#, 7),
        (r#","max_completion_tokens":7,"messages":"012345""#, 9),
        (r#","max_tokens":"7""#, 0),
        (r#","max_tokens":null"#, 0),
        (r#","max_tokens":-1"#, 0),
    ] {
        let more = format!(r#""model":"m"{body}"#);
        let of = |id: &str| line(id, "m").replace(r#""model":"m""#, &more);
        let plan = validate(&[of("a"), of("b")].join("\n")).unwrap();
        assert_eq!(plan.tokens, 2 * expected, "{body}");
    }
}

#[test]
fn errors_have_the_number_of_their_line() {
    let (a, b) = (line("a", "m"), line("b", "unknown"));
    let url = line("c", "m").replace("/chat", "");
    let text = format!("{a}\n\n{{\n{a}\n{b}\n{b}\n{url}");
    check(
        &text,
        &[
            ("invalid_json_line", Some(3)),
            ("duplicate_custom_id", Some(4)),
            ("model_not_found", Some(5)),
            ("duplicate_custom_id", Some(6)),
            ("invalid_url", Some(7)),
        ],
    );
    // Elsewhere it is no byte order mark, but something that is no JSON.
    let text = format!("{a}\n\u{feff}{}", line("d", "m"));
    check(&text, &[("invalid_json_line", Some(2))]);
}

#[test]
fn a_file_without_requests_is_empty() {
    for text in ["", "\n", "\u{feff}", "\u{feff}\r\n \t\r\n"] {
        check(text, &[("empty_file", None)]);
    }
}

#[test]
fn too_many_lines_end_the_reading() {
    let lines: Vec<_> = (0..4).map(|id| line(&id.to_string(), "m")).collect();
    let mut three = validator(Flavor::OpenAi, 3);
    three.push(lines[..3].join("\n").as_bytes());
    assert_eq!(three.finish().unwrap().total, 3);
    let mut four = validator(Flavor::OpenAi, 3);
    four.push(format!("{}\n", lines.join("\n")).as_bytes());
    assert!(four.is_decided());
    four.push(b"{");
    assert_eq!(
        errors_of(four.finish()),
        [("too_many_tasks".to_owned(), None)]
    );
}

#[test]
fn errors_are_kept_up_to_a_bound() {
    let mut validator = validator(Flavor::OpenAi, 1_000);
    for _ in 0..MAX_ERRORS + 9 {
        validator.push(b"x\n");
    }
    assert!(validator.is_decided());
    assert_eq!(errors_of(validator.finish()).len(), MAX_ERRORS);
}

#[test]
fn a_line_that_is_too_long_is_not_held() {
    let piece = vec![b'x'; 3 << 20];
    let mut validator = validator(Flavor::OpenAi, 10);
    validator.push(line("a", "m").as_bytes());
    validator.push(b"\n");
    for _ in 0..4 {
        validator.push(&piece);
        assert!(validator.held.len() as u64 <= MAX_LINE_BYTES);
    }
    assert!(validator.held.is_empty());
    validator.push(b"\n{");
    let expected = [
        ("line_too_long".to_owned(), Some(2)),
        ("invalid_json_line".to_owned(), Some(3)),
    ];
    assert_eq!(errors_of(validator.finish()), expected);
}

#[test]
fn a_line_of_the_greatest_length_is_taken() {
    let least = line("a", "m");
    let mut text = line("a", "m");
    let filler = " ".repeat(MAX_LINE_BYTES as usize - least.len());
    text.insert_str(least.len() - 1, &filler);
    assert_eq!(validate(&text).unwrap().total, 1);
    text.insert(least.len() - 1, ' ');
    check(&text, &[("line_too_long", Some(1))]);
}

#[test]
fn a_model_is_asked_for_once() {
    let mut asked = Vec::new();
    let mut validator = Validator::new(CHAT, Flavor::OpenAi, 1_000, |model: &str| {
        asked.push(model.to_owned());
        None
    });
    for id in 0..6 {
        let model = if id % 2 == 0 { "m" } else { "n" };
        validator.push(format!("{}\n", line(&id.to_string(), model)).as_bytes());
    }
    assert_eq!(validator.finish().unwrap().total, 6);
    assert_eq!(asked, ["m", "n"]);
}

#[test]
fn lines_of_a_messages_batch_fail_one_by_one_later() {
    let text = [line("a", "unknown"), "{".to_owned(), line("b", "m")].join("\n");
    let mut lenient = validator(Flavor::Messages, 10);
    lenient.push(text.as_bytes());
    assert_eq!(lenient.finish().unwrap().total, 3);
    let empty = validator(Flavor::Messages, 10);
    assert_eq!(errors_of(empty.finish()), [("empty_file".to_owned(), None)]);
}

/// A piece of a file.
fn part() -> impl Strategy<Value = String> {
    let id = 0..12_u32;
    prop_oneof![
        6 => (id, 0..40_usize).prop_map(|(id, spaces)| {
            format!("{}{}", " ".repeat(spaces), line(&id.to_string(), "m"))
        }),
        6 => any::<u32>().prop_map(|id| line(&format!("long {id}"), "m")),
        1 => any::<u32>().prop_map(|id| line(&format!("other {id}"), "unknown")),
        1 => Just("{".to_owned()),
        1 => Just(String::new()),
        1 => Just(" \t".to_owned()),
    ]
}

fn file() -> impl Strategy<Value = String> {
    let parts = proptest::collection::vec((part(), any::<bool>()), 0..14);
    (any::<bool>(), parts, any::<bool>()).prop_map(|(has_bom, parts, has_end)| {
        let mut text = String::new();
        if has_bom {
            text.push('\u{feff}');
        }
        for (part, has_return) in &parts {
            text.push_str(part);
            text.push_str(if *has_return { "\r\n" } else { "\n" });
        }
        if !has_end {
            text.pop();
        }
        text
    })
}

/// As a replica reads the file: by the ranges of the shards alone.
fn lines_of_shards(text: &[u8], plan: &Plan) -> Vec<(u32, Vec<u8>)> {
    let mut found = Vec::new();
    for shard in &plan.shards {
        let range = shard.range().start as usize..shard.range().end as usize;
        let lines: Vec<_> = shards::lines(&text[range], shard.first_line).collect();
        assert_eq!(lines.len(), shard.lines as usize);
        found.extend(
            lines
                .into_iter()
                .map(|(number, line)| (number, line.to_vec())),
        );
    }
    found
}

proptest! {
    #[test]
    fn pieces_give_the_plan_of_the_whole(
        text in file(),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
        flavor in prop_oneof![Just(Flavor::OpenAi), Just(Flavor::Messages)],
    ) {
        let text = text.as_bytes();
        let mut whole = validator(flavor, 10);
        whole.shards = ShardCutter::new(3, 400);
        whole.push(text);
        let mut pieces = validator(flavor, 10);
        pieces.shards = ShardCutter::new(3, 400);
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        let mut at = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[at..cut]);
            at = cut;
        }
        let whole = whole.finish();
        prop_assert_eq!(&pieces.finish(), &whole);
        let Ok(plan) = whole else { return Ok(()) };
        // The plainest reading of the file.
        let content = text.strip_prefix(&BOM).unwrap_or(text);
        let lines = content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        let lines = lines.filter(|line| !line.is_empty()).map(<[u8]>::to_vec);
        let expected: Vec<_> = (0_u32..).zip(lines).collect();
        prop_assert_eq!(plan.total as usize, expected.len());
        prop_assert_eq!(lines_of_shards(text, &plan), expected);
        for shard in &plan.shards {
            prop_assert!(shard.lines <= 3 && (shard.lines == 1 || shard.bytes <= 400));
        }
    }
}

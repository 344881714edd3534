use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

const NAMES: [&str; 7] = [
    "deepseek",
    "flags",
    "gpt2",
    "llama3",
    "o200k",
    "qwen2",
    "sentencepiece",
];
/// Parts of random texts: words, digits, white space, combining marks, other scripts, added tokens.
const SNIPPETS: &[&str] = &[
    "The worker that is already warm",
    " it's",
    " we'LL",
    "don't",
    " a",
    "I",
    "HTTPServer",
    "camelCase",
    " größer",
    "café",
    "cafe\u{301}",
    "e\u{301}",
    "ﬁne",
    "naïve ",
    "Привет, мир",
    "Γειά",
    "नमस्ते दुनिया",
    "สวัสดี",
    "你好，世界。",
    "東京は日本",
    "カタカナ",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום",
    "😀",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈👍🏽",
    "0",
    "42",
    "1234567",
    " 3.14",
    "1,000,000",
    "½²Ⅷ",
    "٣٤٥",
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n",
    "\r\n",
    "\n \n",
    "\t",
    "\t\t\t",
    " \n",
    "\u{a0}",
    "\u{3000}",
    "\u{200b}",
    "\u{2028}",
    "\u{85}",
    "\0",
    "\u{1}\u{1f}",
    "\u{7f}",
    "\u{feff}",
    "\u{fffd}",
    "\u{10ffff}",
    ".",
    "...",
    "!?",
    " --",
    "/",
    "//",
    "\n/",
    "\"'`",
    "()[]{}",
    "<",
    ">",
    "|",
    "<|",
    "|>",
    "_",
    "snake_case_name",
    "x += y << 3;",
    "def f(x):\n    return x\n",
    "{\"a\": [1, null]}",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|>system",
    "<|im_star",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<｜User｜>",
    "<｜end▁of▁sentence｜>",
    "<|start|>",
    "<|message|>",
    "<|user|>",
    "<s>",
    "</s>",
    "<unk>",
    "[TAG]",
    "<0x0A>",
    "▁",
    "<left>",
    "<right>",
    "<both>",
    "word",
    " word ",
    "sword",
    "<norm>",
    "#",
    "//\n",
    "'s\n",
    "\u{300}\nA",
    ".\nNext",
];

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/tokenizers")
        .join(format!("{name}.json"))
}

pub(in crate::prompt) fn vocabulary(name: &str) -> Vocabulary {
    let json = std::fs::read(file(name)).unwrap();
    Vocabulary::new(serde_json::from_slice(&json).unwrap()).unwrap()
}

/// Loaded once.
static ALL: LazyLock<Vec<(&str, Vocabulary)>> =
    LazyLock::new(|| NAMES.map(|name| (name, vocabulary(name))).into());

pub(in crate::prompt) fn loaded(name: &str) -> &'static Vocabulary {
    let found = ALL.iter().find(|(other, _)| *other == name);
    &found.unwrap().1
}

fn ids(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    vocabulary.encode(text, &mut ids).unwrap();
    ids
}

fn ids_of_pieces(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for piece in vocabulary.pieces(text) {
        vocabulary.encode(piece, &mut ids).unwrap();
    }
    ids
}

/// Random sequences of snippets.
fn texts() -> impl Strategy<Value = String> {
    let snippet = proptest::sample::select(SNIPPETS);
    proptest::collection::vec((snippet, 1usize..4), 0..40).prop_map(|snippets| {
        snippets
            .into_iter()
            .map(|(text, times)| text.repeat(times))
            .collect()
    })
}

/// Texts of many lines, several pieces long, with and without added tokens.
fn long_texts() -> impl Strategy<Value = String> {
    let line = texts().prop_map(|text| text + "\n");
    proptest::collection::vec(line, 20..60).prop_map(|lines| lines.concat())
}

#[test]
fn token_ids_equal_those_of_the_tokenizers_crate() {
    let mut seed = 1_u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize
    };
    for name in NAMES {
        let ours = vocabulary(name);
        let mut reference = tokenizers::Tokenizer::from_file(file(name)).unwrap();
        reference.with_truncation(None).unwrap();
        let mut bytes = 0;
        while bytes < 150_000 {
            let text: String = (0..next() % 200)
                .map(|_| SNIPPETS[next() % SNIPPETS.len()])
                .collect();
            let expected = reference.encode_fast(text.as_str(), false).unwrap();
            assert_eq!(ids(&ours, &text), expected.get_ids(), "{name}: {text:?}");
            bytes += text.len();
        }
        let marked = reference.encode_fast("x", true).unwrap();
        let (before, after) = ours.bos_eos();
        assert_eq!([before, &ids(&ours, "x"), after].concat(), marked.get_ids());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_ids_of_the_pieces_are_the_ids_of_the_text(text in texts()) {
        for (name, vocabulary) in ALL.iter() {
            prop_assert_eq!(ids_of_pieces(vocabulary, &text), ids(vocabulary, &text), "{}", name);
            prop_assert_eq!(vocabulary.pieces(&text).collect::<String>(), text.as_str());
        }
    }

    #[test]
    fn the_ids_of_the_pieces_are_the_ids_of_a_long_text(text in long_texts()) {
        for (name, vocabulary) in ALL.iter() {
            prop_assert_eq!(ids_of_pieces(vocabulary, &text), ids(vocabulary, &text), "{}", name);
        }
    }

    #[test]
    fn appended_text_moves_no_earlier_boundary(text in long_texts(), more in texts()) {
        for (name, vocabulary) in ALL.iter() {
            let before: Vec<&str> = vocabulary.pieces(&text).collect();
            let longer = format!("{text}{more}");
            let after: Vec<&str> = vocabulary.pieces(&longer).collect();
            // The last piece may grow, or its last token become another.
            let kept = before.len().saturating_sub(2);
            prop_assert_eq!(&before[..kept], &after[..kept], "{}", name);
        }
    }
}

#[test]
fn long_texts_are_split_at_lines_for_supported_word_patterns() {
    let text = "A line of some length that ends here\n".repeat(1_000);
    for (name, at_lines) in [
        ("qwen2", true),
        ("llama3", true),
        ("o200k", true),
        ("flags", false),
        ("sentencepiece", false),
    ] {
        let vocabulary = vocabulary(name);
        assert_eq!(vocabulary.pieces(&text).count() > 10, at_lines, "{name}");
    }
}

#[test]
fn a_chat_is_split_before_each_turn() {
    let vocabulary = vocabulary("qwen2");
    let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let pieces: Vec<&str> = vocabulary.pieces(text).collect();
    assert_eq!(
        pieces,
        [
            "<|im_start|>user\nhi",
            "<|im_end|>\n",
            "<|im_start|>assistant\n"
        ]
    );
}

#[test]
fn an_unsupported_tokenizer_is_refused_with_a_reason() {
    let wrong = serde_json::json!({"model": {"type": "Unigram", "vocab": []}, "added_tokens": []});
    let error = Vocabulary::new(wrong).unwrap_err();
    assert!(error.contains("Unigram"), "{error}");
}

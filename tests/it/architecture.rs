//! The import direction: a top-level module uses only those of lower layers, and files never import each
//! other in a circle. And which tables are not used where clients' bodies are read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest. Siblings of one layer do not import each other.
const LAYERS: &[&[&str]] = &[
    &["ids", "json_scan", "secret", "units"],
    &["observe"],
    &["http"],
    &["traces"],
    &["fleet", "jwt", "kv", "prompt", "state_token", "store"],
    &["limits", "queue", "routing", "webhooks"],
    &["peers"],
    &["relay"],
    &["openai"],
    &["admin", "batches", "bridge", "responses"],
    &["api"],
    &["config"],
    &["app"],
    &["sim"],
    &["cli"],
];

/// Their tables with texts as keys have a seed, which `rustc-hash` has not: a client could choose keys that all lie in
/// one place of a table, and each of them would be compared with all before it.
const READERS_OF_BODIES: &[&str] = &["api", "batches", "bridge", "openai", "prompt", "responses"];

#[test]
fn modules_import_only_from_lower_layers() {
    let tree = Tree::of_src();
    let mut wrong = BTreeSet::new();
    for (module, text) in &tree.files {
        let Some(from) = module.first() else { continue };
        wrong.extend(against_the_layers(from, text));
    }
    assert!(wrong.is_empty(), "imports against the layers: {wrong:#?}");
    let modules: BTreeSet<&str> = tree.top_modules().collect();
    let listed: BTreeSet<&str> = LAYERS
        .iter()
        .flat_map(|layer| layer.iter().copied())
        .collect();
    assert_eq!(modules, listed, "LAYERS lists every module, and no other");
}

#[test]
fn files_do_not_import_each_other_in_circles() {
    let circles = Tree::of_src().circles();
    assert!(circles.is_empty(), "import circles: {circles:#?}");
}

#[test]
fn the_parts_of_the_relay_do_not_import_each_other_in_circles() {
    let circles = Tree::of_src().circles_of_parts("relay");
    assert!(circles.is_empty(), "import circles: {circles:#?}");
}

#[test]
fn texts_are_keys_of_tables_with_a_seed_where_clients_bodies_are_read() {
    let tree = Tree::of_src();
    let mut found = Vec::new();
    for (module, code) in &tree.files {
        if READERS_OF_BODIES.contains(&module[0].as_str()) {
            let tables = unseeded_tables_of_texts(code).into_iter();
            found.extend(tables.map(|table| format!("{}.rs: {table}", module.join("/"))));
        }
    }
    assert!(found.is_empty(), "use std's tables instead: {found:#?}");
    assert_eq!(
        unseeded_tables_of_texts("a: FxHashMap<\n    String, u8>, b: FxHashSet<&'a str>"),
        ["FxHashMap<String", "FxHashSet<&"]
    );
    assert!(unseeded_tables_of_texts("a: FxHashMap<u64, String>").is_empty());
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

#[test]
fn a_circle_of_files_is_found_inside_a_module_and_through_groups() {
    let circles = |files: &[(&str, &str)]| {
        let texts = files.iter().map(|(path, text)| (*path, (*text).to_owned()));
        Tree::new(texts).circles()
    };
    let with_parent = [
        (
            "kv.rs",
            "mod index;\nuse self::index::Index;\npub struct Key;",
        ),
        ("kv/index.rs", "use super::Key;"),
    ];
    assert_eq!(circles(&with_parent), [["kv.rs", "kv/index.rs"]]);
    let grouped = [
        ("kv.rs", "mod a;\nmod b;\nmod c;"),
        ("kv/a.rs", "use crate::{ids, kv::{b::{self, B}}};"),
        ("kv/b.rs", "fn f() { super::c::g() }"),
        ("kv/c.rs", "use super::{a::A};"),
    ];
    assert_eq!(circles(&grouped), [["kv/a.rs", "kv/b.rs", "kv/c.rs"]]);
    let by_declaration = [
        ("kv.rs", "mod a;\nfn f() { a::g() }\npub struct Key;"),
        ("kv/a.rs", "use crate::kv::Key;"),
    ];
    assert_eq!(circles(&by_declaration).len(), 1);
    let none = [
        ("kv.rs", "mod a;\npub mod b;\nuse self::a::A;"),
        (
            "kv/a.rs",
            "// use super::Key;\nuse super::b::B;\n#[cfg(test)]\nmod tests {\n    use super::super::*;\n}",
        ),
        ("kv/b.rs", "pub struct B;"),
    ];
    assert_eq!(circles(&none), Vec::<Vec<String>>::new());
}

#[test]
fn a_circle_of_parts_is_found_though_no_files_form_one() {
    let files = [
        ("kv.rs", "mod a;\nmod b;\nmod c;"),
        ("kv/a.rs", "mod x;\nuse super::b::y::Y;"),
        ("kv/a/x.rs", "pub struct X;"),
        ("kv/b.rs", "mod y;\nmod z;\nuse super::c::C;"),
        ("kv/b/y.rs", "pub struct Y;"),
        ("kv/b/z.rs", "use crate::kv::a::x::X;"),
        ("kv/c.rs", "pub struct C;"),
    ];
    let tree = Tree::new(
        files
            .into_iter()
            .map(|(path, text)| (path, text.to_owned())),
    );
    assert_eq!(tree.circles(), Vec::<Vec<String>>::new());
    assert_eq!(tree.circles_of_parts("kv"), [["kv/a.rs", "kv/b.rs"]]);
    assert_eq!(tree.circles_of_parts("fleet"), Vec::<Vec<String>>::new());
}

/// A module's path below the crate: `["kv", "index"]`. Empty for the crate's root.
type Module = Vec<String>;

/// The source files, without their tests and comments.
struct Tree {
    files: BTreeMap<Module, String>,
    /// What a module passes on: `pub use self::index::Index` in `kv` makes `kv::Index` mean `kv::index::Index`.
    passed_on: BTreeMap<Module, Module>,
}

impl Tree {
    fn of_src() -> Self {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let files = rust_files(&src);
        let texts = files.iter().filter_map(|file| {
            let path = file.strip_prefix(&src).unwrap().to_str().unwrap();
            let is_test = path.ends_with("/tests.rs") || path.contains("/tests/");
            let is_root = matches!(path, "lib.rs" | "main.rs");
            (!is_test && !is_root).then(|| (path, fs::read_to_string(file).unwrap()))
        });
        Self::new(texts)
    }

    fn new<'a>(texts: impl Iterator<Item = (&'a str, String)>) -> Self {
        let mut files = BTreeMap::new();
        let mut passed_on = BTreeMap::new();
        for (path, text) in texts {
            let module = module_of(path);
            let (code, re_exports) = split_re_exports(&code_of(&text));
            for (at, start) in path_starts(&re_exports) {
                let mut paths = Vec::new();
                expand(
                    &re_exports[at + start.len() + 2..],
                    &base(&module, start),
                    &mut paths,
                );
                for path in paths {
                    let name = path.last().expect("a path has a name").clone();
                    passed_on.insert([module.as_slice(), &[name]].concat(), path);
                }
            }
            files.insert(module, code);
        }
        Self { files, passed_on }
    }

    fn top_modules(&self) -> impl Iterator<Item = &str> {
        self.files
            .keys()
            .filter_map(|module| module.first())
            .map(String::as_str)
    }

    /// The files that import each other, directly or over others; each group sorted.
    fn circles(&self) -> Vec<Vec<String>> {
        let imports = self.files.iter();
        let imports = imports.map(|(module, text)| (module, self.imported_files(module, text)));
        circles(imports.collect())
    }

    /// The parts of a module that import each other, directly or over others; each group sorted. A part is what lies directly
    /// below the module, a folder as one with its file.
    fn circles_of_parts(&self, of: &str) -> Vec<Vec<String>> {
        let part = |module: &Module| {
            let is_inside = module.len() > 1 && module[0] == of;
            let (part, _) = self.files.get_key_value(module.get(..2)?)?;
            is_inside.then_some(part)
        };
        let mut imports: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
        for (module, text) in &self.files {
            let Some(from) = part(module) else { continue };
            let to = self.imported_files(module, text).into_iter();
            let to = to.filter_map(part).filter(|to| *to != from);
            imports.entry(from).or_default().extend(to);
        }
        circles(imports)
    }

    fn imported_files(&self, module: &Module, text: &str) -> BTreeSet<&Module> {
        let mut paths = Vec::new();
        for (at, start) in path_starts(text) {
            expand(
                &text[at + start.len() + 2..],
                &base(module, start),
                &mut paths,
            );
        }
        // A child that the file declares may be named without `self::`.
        for child in text.lines().filter_map(declared_module) {
            let names_it = |(at, _): (usize, &str)| {
                !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
            };
            if text.match_indices(&format!("{child}::")).any(names_it) {
                paths.push([module.as_slice(), &[child.to_owned()]].concat());
            }
        }
        let files = paths.iter().filter_map(|path| self.file_of(path));
        files.filter(|file| *file != module).collect()
    }

    /// The file of the longest part of a path that is a module.
    fn file_of(&self, path: &[String]) -> Option<&Module> {
        let passed = (1..=path.len()).find_map(|length| {
            let target = self.passed_on.get(&path[..length])?;
            let is_file = self.files.contains_key(&path[..length]);
            (!is_file).then(|| [target, &path[length..]].concat())
        });
        if let Some(path) = passed {
            return self.file_of(&path);
        }
        (1..=path.len())
            .rev()
            .find_map(|length| self.files.get_key_value(&path[..length]))
            .map(|(module, _)| module)
    }
}

fn circles(imports: BTreeMap<&Module, BTreeSet<&Module>>) -> Vec<Vec<String>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = imports
        .keys()
        .map(|module| (*module, reachable(module, &imports)))
        .collect();
    let mut circles = BTreeSet::new();
    for (module, others) in &reached {
        let circle = others
            .iter()
            .filter(|other| reached[*other].contains(module));
        let mut circle: Vec<String> = circle.map(|module| module.join("/") + ".rs").collect();
        circle.sort();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(
    from: &'a Module,
    imports: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        open.extend(
            imports[module]
                .iter()
                .filter(|other| reached.insert(**other)),
        );
    }
    reached
}

/// The code, and apart from it what it re-exports: passing a name on is not using it.
fn split_re_exports(code: &str) -> (String, String) {
    let (mut used, mut passed) = (String::new(), String::new());
    let mut is_passed = false;
    for line in code.lines() {
        is_passed |= line.starts_with("pub use ") || line.starts_with("pub(");
        is_passed &=
            line.starts_with("pub use ") || line.contains(" use ") || !line.starts_with("pub(");
        let to = if is_passed { &mut passed } else { &mut used };
        to.push_str(line);
        to.push('\n');
        is_passed &= !line.ends_with(';');
    }
    (used, passed)
}

/// The module that a path begins at.
fn base(module: &Module, start: &str) -> Module {
    match start {
        "crate" => Module::new(),
        "self" => module.clone(),
        _ => module[..module.len().saturating_sub(1)].to_vec(),
    }
}

/// Where a path begins with `crate::`, `self::` or `super::`, and with which.
fn path_starts(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let starts = ["crate", "self", "super"].into_iter();
    starts.flat_map(move |start| {
        text.match_indices(start).filter(move |(at, _)| {
            let before = text[..*at].chars().next_back();
            let is_first = !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | ':'));
            is_first && text[at + start.len()..].starts_with("::")
        })
    })
}

/// Adds each path that a text names right here: `b::C` is one, `{b::C, d}` are two, `super::e` goes up.
fn expand(text: &str, base: &[String], paths: &mut Vec<Module>) {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        for member in group_members(group) {
            expand(member, base, paths);
        }
        return;
    }
    let name = first_name(text);
    let rest = &text[name.len()..];
    let path = match name.as_str() {
        "super" => base[..base.len().saturating_sub(1)].to_vec(),
        "self" => base.to_vec(),
        _ => [base, &[name]].concat(),
    };
    match rest.strip_prefix("::") {
        Some(rest) => expand(rest, &path, paths),
        None => paths.push(path),
    }
}

/// `module` -> `index` of `pub mod index;`.
fn declared_module(line: &str) -> Option<&str> {
    let (before, name) = line.strip_suffix(';')?.split_once("mod ")?;
    (before.is_empty() || before.starts_with("pub")).then_some(name)
}

fn module_of(path: &str) -> Module {
    let path = path.strip_suffix(".rs").unwrap();
    path.split('/').map(str::to_owned).collect()
}

/// The text without comments and without the modules of its unit tests.
fn code_of(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("#[cfg(test)]") && lines.peek().is_some_and(|next| next.ends_with('{'))
        {
            lines.by_ref().find(|line| *line == "}");
        } else if !line.trim_start().starts_with("//") {
            code.push_str(line);
            code.push('\n');
        }
    }
    code
}

/// `from -> to` for each import that goes the wrong way.
fn against_the_layers(from: &str, text: &str) -> BTreeSet<String> {
    let names = top_level_names(text).into_iter();
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

/// The top-level modules that a text names: the name after each `crate::`, or each name of a group
/// `crate::{a, b::C}`.
fn top_level_names(text: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for rest in text.split("crate::").skip(1) {
        expand(rest, &[], &mut paths);
    }
    paths
        .into_iter()
        .filter_map(|path| path.into_iter().next())
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

/// The tables without a seed whose keys are texts, as far as their types are written out.
fn unseeded_tables_of_texts(code: &str) -> Vec<String> {
    let code: String = code.split_whitespace().collect();
    let mut found = Vec::new();
    for table in ["FxHashMap<", "FxHashSet<"] {
        for key in ["String", "&", "Cow<", "Box<str>", "Arc<str>"] {
            let start = format!("{table}{key}");
            if code.contains(&start) {
                found.push(start);
            }
        }
    }
    found
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

//! The documentation holds together: links lead somewhere, and the README stays short.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn every_relative_link_leads_to_a_file_and_its_heading() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let file = match target {
                "" => page.clone(),
                target => page.parent().unwrap().join(target),
            };
            let is_found = file.exists()
                && (anchor.is_empty()
                    || anchors(&fs::read_to_string(&file).unwrap()).contains(anchor));
            if !is_found {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere: {broken:#?}");
}

#[test]
fn every_metric_that_a_page_names_is_in_the_reference() {
    let reference = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let mut unknown = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for rest in text.split("warmroute_").skip(1) {
            let is_of_name = |c: char| c.is_ascii_lowercase() || c == '_';
            let name = rest.split(|c| !is_of_name(c)).next().unwrap();
            // A query names a histogram by one of its series.
            let series = ["_bucket", "_count", "_sum"];
            let family = series.iter().find_map(|series| name.strip_suffix(series));
            let is_known = |name| reference.contains(&format!("`warmroute_{name}`"));
            if !is_known(name) && !family.is_some_and(is_known) {
                unknown.push(format!("{}: warmroute_{name}", page.display()));
            }
        }
    }
    assert!(
        unknown.is_empty(),
        "metrics that do not exist: {unknown:#?}"
    );
}

#[test]
fn every_file_that_the_architecture_names_exists() {
    let text = fs::read_to_string(root().join("src/ARCHITECTURE.md")).unwrap();
    let is_path = |span: &&str| {
        span.contains('/')
            && span
                .chars()
                .all(|c| c.is_alphanumeric() || "/_.".contains(c))
    };
    let paths = text.split('`').skip(1).step_by(2).filter(is_path);
    let is_missing = |path: &&str| {
        let places = [
            format!("src/{path}"),
            format!("src/{path}.rs"),
            (*path).to_owned(),
        ];
        !path.starts_with('/') && !places.iter().any(|place| root().join(place).exists())
    };
    let missing: Vec<&str> = paths.filter(is_missing).collect();
    assert!(missing.is_empty(), "no such files: {missing:#?}");
}

/// A line in a block of code that names its level and target, and a text in code behind `WARN (` or `INFO (`.
#[test]
fn every_log_line_that_a_page_quotes_is_one_that_the_source_writes() {
    let source = source_in(&root().join("src"));
    let (mut unknown, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for message in quoted_log_messages(&text) {
            count += 1;
            if !source.contains(message) {
                unknown.push(format!("{}: {message}", page.display()));
            }
        }
    }
    assert!(unknown.is_empty(), "no such log lines: {unknown:#?}");
    assert!(count >= 2, "{count}");
}

const LEVELS: [&str; 4] = ["ERROR", "WARN", "INFO", "DEBUG"];

fn quoted_log_messages(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for level in LEVELS {
        let of_target = format!("{level} warmroute");
        let lines = text.split(&*of_target).skip(1);
        let behind_target = lines.filter_map(|line| line.lines().next()?.split_once(": "));
        // Up to the first field.
        found.extend(behind_target.map(|(_, line)| {
            match line.find('=') {
                Some(equals) => line[..equals]
                    .rsplit_once(' ')
                    .map_or("", |(before, _)| before),
                None => line,
            }
        }));
        let in_prose = format!("{level} (`");
        let spans = text.split(&*in_prose).skip(1);
        found.extend(spans.filter_map(|span| span.split('`').next()));
    }
    found
}

fn source_in(folder: &Path) -> String {
    let mut source = String::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source += &source_in(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            source += &fs::read_to_string(path).unwrap();
        }
    }
    source
}

#[test]
fn log_lines_are_found_in_blocks_and_in_prose() {
    let text = "a WARN (`it is gone`)\n2026 INFO warmroute::access: request method=\"POST\"\nWARN warmroute::kv: two words";
    assert_eq!(
        quoted_log_messages(text),
        ["two words", "it is gone", "request"]
    );
}

#[test]
fn a_broken_link_and_a_missing_heading_are_seen() {
    let text =
        "[a](x.md) ![b](y.svg#z) [c](https://example.com) `[d](no.md)`\n```\n[e](no.md)\n```\n";
    assert_eq!(links(text), ["x.md", "y.svg#z"]);
    let headings = "# KV events\n## What happens when ... stops\n<a id=\"redis\"></a>\n";
    let expected = ["kv-events", "redis", "what-happens-when--stops"];
    assert!(anchors(headings).iter().eq(expected));
}

#[test]
fn the_readme_is_at_most_8_kb_and_names_every_page() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(
        readme.len() <= 8 << 10,
        "README.md has {} bytes",
        readme.len()
    );
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let listed: BTreeSet<&str> = links(&summary).into_iter().collect();
    for page in pages_in(&root().join("docs")) {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(
            name == "SUMMARY.md" || listed.contains(name),
            "docs/SUMMARY.md lists {name}"
        );
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The Markdown pages for readers.
fn pages() -> Vec<PathBuf> {
    let folders = [
        "",
        "docs",
        "src",
        "examples",
        "deploy",
        "benches",
        "benches/rig",
    ];
    folders
        .iter()
        .flat_map(|folder| pages_in(&root().join(folder)))
        .collect()
}

fn pages_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
}

/// The targets of a page's links within the project, code left out.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        if is_code {
            continue;
        }
        let outside_code = line.split('`').step_by(2);
        for part in outside_code {
            let targets = part
                .match_indices("](")
                .filter_map(|(at, _)| part[at + 2..].split_once(')'));
            found.extend(
                targets
                    .map(|(target, _)| target)
                    .filter(|target| !target.contains("://")),
            );
        }
    }
    found
}

/// The anchors of a page's headings, as GitHub makes them, and those written as `<a id="...">`.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let of_headings = headings.map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    });
    let written = text
        .split("<a id=\"")
        .skip(1)
        .filter_map(|rest| rest.split_once('"'));
    of_headings
        .chain(written.map(|(id, _)| id.to_owned()))
        .collect()
}

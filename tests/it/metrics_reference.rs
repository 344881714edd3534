//! `docs/metrics.md` lists every metric of the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::cluster::Cluster;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");

#[tokio::test]
async fn the_committed_page_is_what_the_code_says() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(PAGE, &page).unwrap();
    }
    let committed = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        page == committed,
        "docs/metrics.md differs from the code; write it again with\n\n    \
         UPDATE_DOCS=1 cargo test --test it metrics_reference\n"
    );
}

/// Names in string literals: a metric that the page misses is registered by something that the page's
/// writer does not start.
#[tokio::test]
async fn every_metric_in_the_source_is_on_the_page() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    let mut missing = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") {
                let source = fs::read_to_string(&path).unwrap();
                missing.extend(names(&source).filter(|name| !page.contains(&format!("`{name}`"))));
            }
        }
    }
    assert!(missing.is_empty(), "not in the reference: {missing:?}");
}

/// The string literals that are nothing but a metric's name.
fn names(source: &str) -> impl Iterator<Item = String> {
    let literals = source.split("\"warmroute_").skip(1);
    let names = literals
        .filter_map(|rest| rest.split_once('"'))
        .map(|(name, _)| name);
    let is_name = |it: &&str| it.bytes().all(|it| it.is_ascii_lowercase() || it == b'_');
    names
        .filter(is_name)
        .map(|name| format!("warmroute_{name}"))
}

#[tokio::test]
async fn every_scraped_metric_is_on_the_page() {
    let page = warmroute::app::metrics_reference::page().await.unwrap();
    let scraped = Cluster::fast(1).await.admin("/metrics").await;
    let families = scraped
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    for family in families {
        let (name, kind) = family.split_once(' ').unwrap();
        assert!(page.contains(&format!("| `{name}` | {kind} |")), "{family}");
    }
}

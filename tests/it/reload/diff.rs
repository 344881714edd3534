//! `warmroute config diff`.

use std::path::Path;
use std::process::Command;

use super::{Folder, engines, text, workers};

fn diff(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["config", "diff"])
        .args(arguments)
        .env_remove("WARMROUTE_ADMIN_TOKEN")
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let code = output.status.code().unwrap();
    (code, String::from_utf8(text).unwrap())
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn two_files_are_compared() {
    let folder = Folder::new();
    let (old, new) = (folder.path("old"), folder.path("new.yaml"));
    let with = |key: &str, threads: u32| {
        format!(
            "workers: [{{url: 'http://a:1', api_key: {key}}}]\nruntime: {{threads: {threads}}}\n"
        )
    };
    std::fs::write(&old, with("hush", 1)).unwrap();
    std::fs::write(&new, with("hush", 1) + "# the same\n").unwrap();
    let compare = || diff(&[path(&new), "--with", path(&old)]);
    let (code, text) = compare();
    assert_eq!((code, &*text), (0, "no changes\n"));
    std::fs::write(&new, with("quiet", 2)).unwrap();
    let (code, text) = compare();
    assert_eq!(code, 1);
    assert!(
        text.contains("~ runtime.threads: 1 -> 2 (needs a restart)\n"),
        "{text}"
    );
    assert!(
        text.contains("~ workers[http://a:1].api_key: changed\n"),
        "{text}"
    );
    assert!(!text.contains("hush") && !text.contains("quiet"), "{text}");
    std::fs::write(&new, "wrokers: []\n").unwrap();
    let (code, text) = compare();
    assert_eq!(code, 2);
    assert!(text.contains("wrokers"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_compared_with_what_runs() {
    let folder = Folder::new();
    let engines = engines(1).await;
    let token = "admin: {token: 0123456789abcdef, ";
    let good = text(&workers(&engines)).replace("admin: {", token);
    let cluster = folder.start(engines, &good).await;
    let url = format!("http://{}", cluster.router.admin);
    let new = folder.path("new.yaml");
    let compare = |text: &str| {
        std::fs::write(&new, text).unwrap();
        let (new, url) = (path(&new).to_owned(), url.clone());
        tokio::task::spawn_blocking(move || diff(&[&new, "--url", &url]))
    };
    let (code, text) = compare(&good).await.unwrap();
    assert_eq!(code, 0, "{text}");
    let (code, text) = compare(&format!("{good}routing: {{policy: random}}\n"))
        .await
        .unwrap();
    assert_eq!(code, 1, "{text}");
    assert!(
        text.starts_with("~ routing.policy: cache_aware -> random\n"),
        "{text}"
    );
    // Without the token it cannot ask, and nothing is compared.
    let replaced = good.replace("abcdef", "abcdeX");
    let (code, text) = compare(&replaced).await.unwrap();
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("401"), "{text}");
    // The token that runs stands beside a file that has another one.
    let with_token = move || diff(&[path(&new), "--url", &url, "--token", "0123456789abcdef"]);
    let (code, text) = tokio::task::spawn_blocking(with_token).await.unwrap();
    assert_eq!(code, 0, "{text}");
}

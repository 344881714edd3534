//! Kubernetes in the configuration, in a build with the feature `kubernetes` and in one without.

use warmroute::config::Config;

fn problems(entry: &str) -> String {
    let text = format!("workers: [\"http://h:1\"]\ndiscovery:\n  - kubernetes: {entry}\n");
    match Config::parse("test.yaml", &text) {
        Ok(_) => String::new(),
        Err(problems) => problems.to_string(),
    }
}

#[cfg(feature = "kubernetes")]
fn check(entry: &str, expected: &str) {
    let found = problems(entry);
    match expected {
        "" => assert_eq!(found, "", "{entry}"),
        expected => assert!(found.contains(expected), "{entry}: {found}"),
    }
}

#[cfg(feature = "kubernetes")]
#[test]
fn one_source_is_needed_and_problems_have_their_place() {
    check("{pods: {selector: app=vllm}}", "");
    check(
        "{pods: {selector: app=vllm, port: http}, namespace: llm}",
        "",
    );
    check("{service: {name: vllm, port: 8000}, role_label: \"\"}", "");
    check(
        "{inference_pool: {name: vllm}, context: prod, kubeconfig: /etc/kubeconfig}",
        "",
    );
    check("{}", "test.yaml:3");
    check("{}", "needs one of `pods: {selector: app=vllm}`");
    check(
        "{pods: {selector: a=b}, service: {name: vllm}}",
        "more than one of `pods`",
    );
    check(
        "{pods: {selector: \"\"}}",
        "discovery[0].kubernetes.pods.selector",
    );
    check(
        "{pods: {selector: a=b, port: 0}}",
        "discovery[0].kubernetes.pods.port",
    );
    check(
        "{pods: {selector: a=b, port: 99999}}",
        "discovery[0].kubernetes.pods.port",
    );
    check(
        "{service: {name: Vllm_1}}",
        "`Vllm_1` is no name of Kubernetes",
    );
    check(
        "{pods: {selector: a=b}, relist_interval: 1m}",
        "unknown key `relist_interval`",
    );
    check(
        "{pods: {selector: a=b}, role: prefill}",
        "needs a connector",
    );
    check(
        "{pods: {selector: a=b}}\n  - kubernetes: {pods: {selector: a=b}}",
        "is listed twice",
    );
    // The same pods of another namespace, and of another cluster.
    for key in ["namespace: other", "kubeconfig: /other"] {
        let other = format!("- kubernetes: {{pods: {{selector: a=b}}, {key}}}");
        check(&format!("{{pods: {{selector: a=b}}}}\n  {other}"), "");
    }
}

#[cfg(not(feature = "kubernetes"))]
#[test]
fn a_build_without_the_feature_names_it() {
    let found = problems("{pods: {selector: app=vllm}}");
    for part in [
        "test.yaml:3",
        "discovery[0].kubernetes",
        "the feature `kubernetes`",
    ] {
        assert!(found.contains(part), "{part}: {found}");
    }
}

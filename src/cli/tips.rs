//! What was probably meant by arguments that clap refuses. Pure.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// An error of arguments, with a tip where there is one. `given` are all arguments of the process.
pub(super) fn explained(mut error: clap::Error, given: &[String]) -> clap::Error {
    let kind = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return error,
    };
    let Some(ContextValue::String(wrong)) = error.get(kind) else {
        return error;
    };
    let takes_a_file = |command: &String| matches!(command.as_str(), "serve" | "check");
    if let Some(tip) = tip(given, wrong) {
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![tip.into()]),
        );
    } else if wrong.starts_with('-') && given.first().is_some_and(takes_a_file) {
        // It says how to pass a flag as FILE.
        error.remove(ContextKind::Suggested);
    }
    error
}

fn tip(given: &[String], wrong: &str) -> Option<String> {
    let command = given.first()?.as_str();
    let flag = wrong.split('=').next().unwrap_or(wrong);
    let is_of_serve = match flag {
        "--config" | "-c" | "--worker" | "--listen" => command.starts_with('-'),
        file => file == command && (file.ends_with(".yaml") || file.ends_with(".yml")),
    };
    let has_command = given
        .iter()
        .any(|argument| matches!(argument.as_str(), "serve" | "check"));
    if is_of_serve && !has_command {
        let all = given.join(" ");
        return Some(format!("did you mean `warmroute serve {all}`?"));
    }
    match (command, flag) {
        ("run" | "start", flag) if flag == command => Some("did you mean `serve`?".to_owned()),
        ("validate" | "-t", flag) if flag == command => Some("did you mean `check`?".to_owned()),
        ("config", "check" | "validate" | "show") => {
            Some("did you mean `warmroute check`? It checks a file and prints it".to_owned())
        }
        ("version", "version") => Some("did you mean `--version`?".to_owned()),
        ("serve" | "check", "--port" | "-p" | "--host" | "--bind" | "--address") => Some(
            "the address and port are one value: `--listen :8080`, or `api.listen` in the configuration"
                .to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::tip;

    #[test]
    fn arguments_of_other_programs_lead_to_those_of_this_one() {
        let check = |line: &str, wrong: &str, expected: Option<&str>| {
            let given: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let found = tip(&given, wrong);
            let is_same = match expected {
                Some(expected) => found.as_ref().is_some_and(|tip| tip.contains(expected)),
                None => found.is_none(),
            };
            assert!(is_same, "{line}: {found:?}");
        };
        let serve = Some("`warmroute serve --config x.yaml`");
        check("--config x.yaml", "--config", serve);
        check("--config=x.yaml", "--config", Some("serve --config=x.yaml"));
        check("--config x.yaml serve", "--config", None);
        check(
            "--worker http://a:1",
            "--worker",
            Some("`warmroute serve --worker http://a:1`"),
        );
        check("demo --worker 3", "--worker", None);
        check("x.yaml", "x.yaml", Some("`warmroute serve x.yaml`"));
        check("run x.yaml", "run", Some("`serve`"));
        check("validate x.yaml", "validate", Some("`check`"));
        check("-t -c x.yaml", "-t", Some("`check`"));
        check("config check x.yaml", "check", Some("`warmroute check`"));
        check("version", "version", Some("`--version`"));
        check("serve x.yaml --port 80", "--port", Some("`api.listen`"));
        check("serve x.yaml --host=::", "--host", Some("`--listen :8080`"));
        check("serve --nonsense", "--nonsense", None);
        check("kv run", "run", None);
    }
}

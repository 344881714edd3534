//! A model's chat template: Jinja as Python's `transformers` configures it, rendered by `minijinja`.
//!
//! Pure apart from compiling. The time is an argument; `render` interprets the fields of a request.

mod format;
mod python;

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value};

pub use self::format::ContentFormat;

/// Calls in calls that a template may make: macros that walk a JSON schema go a few deep.
const RECURSION_MAX: usize = 200;
const NAME: &str = "chat_template";

/// A compiled template.
pub struct Template {
    environment: Environment<'static>,
    source: String,
    format: ContentFormat,
    knows_developer: bool,
}

/// Why a template cannot be compiled or did not render: the template's own words where it raised.
#[derive(Debug, PartialEq)]
pub struct Error(pub String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template")
            .field("bytes", &self.source.len())
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl Template {
    pub fn new(source: &str) -> Result<Self, Error> {
        let syntax = syntax()?;
        let plain = python::without_generation_tags(source);
        let format = ContentFormat::of(&plain, &syntax);
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_debug(false);
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        environment
            .add_template_owned(NAME, plain)
            .map_err(|error| Error(error_text(&error)))?;
        Ok(Self {
            environment,
            format,
            // What the engine looks for, and no more: the word in quotes, anywhere.
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
            source: source.to_owned(),
        })
    }

    /// Whether messages' contents are given to it as texts or as lists of parts.
    pub fn format(&self) -> ContentFormat {
        self.format
    }

    /// Whether it has a word for messages of the developer role.
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn render(&self, context: Value) -> Result<String, Error> {
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|error| Error(error_text(&error)))
    }
}

/// Jinja's own marks, with the white space rules that `transformers` asks for.
fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| Error(error.to_string()))
}

fn error_text(error: &minijinja::Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), _) if error.name().is_none() => detail.to_owned(),
        (Some(detail), Some(line)) => format!("{}: {detail} (line {line})", error.kind()),
        _ => error.to_string(),
    }
}

pub(super) use self::python::now_key;

#[cfg(test)]
mod tests;

//! A model's chat template: Jinja as Python's `transformers` configures it, rendered by `minijinja`.
//!
//! The template engine follows Python in most. Where it does not, a template is written anew before it is compiled: `source`.
//! Pure apart from compiling. The time is an argument; `render` interprets the fields of a request.

mod arguments;
mod dates;
mod filters;
mod format;
mod methods;
mod number;
mod operators;
mod percent;
mod python;
mod python_text;
mod source;
mod texts;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value};

pub use self::format::ContentFormat;
pub(super) use self::number::of_digits;
pub(super) use self::python::now_key;
pub(super) use self::texts::is_space;

/// Maximum depth of nested calls. Macros that print a JSON schema need a few levels.
const MAX_RECURSION: usize = 200;
const NAME: &str = "chat_template";

/// A compiled chat template.
pub struct Template {
    environment: Environment<'static>,
    pub(super) source: String,
    /// Whether the template expects the content of a message as one text or as a list of parts.
    pub(super) format: ContentFormat,
    /// Whether the template handles messages with the developer role.
    pub(super) supports_developer_role: bool,
}

/// Why a template failed to compile or to render. If the template called `raise_exception`, its message.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

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
        // As Python's lexer does it.
        let plain = source.replace("\r\n", "\n").replace('\r', "\n");
        let plain = python::without_generation_tags(&plain);
        let text = |error| Error(error_text(&error));
        let tree = minijinja::machinery::parse(&plain, NAME, syntax(true)?).map_err(text)?;
        let mut environment = Environment::new();
        environment.set_syntax(syntax(false)?);
        environment.set_debug(false);
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        environment
            .add_template_owned(NAME, source::of(&tree))
            .map_err(text)?;
        Ok(Self {
            environment,
            format: ContentFormat::of(&tree),
            // The same check as the engine's: the quoted word anywhere in the source.
            supports_developer_role: source.contains("\"developer\"")
                || source.contains("'developer'"),
            source: source.to_owned(),
        })
    }

    pub fn render(&self, context: Value) -> Result<String, Error> {
        let render = || {
            let template = self.environment.get_template(NAME)?;
            template.render(context)
        };
        // The template engine has panicked on odd values.
        match catch_unwind(AssertUnwindSafe(render)) {
            Ok(rendered) => rendered.map_err(|error| Error(error_text(&error))),
            Err(_) => Err(Error("the template engine failed".to_owned())),
        }
    }
}

/// Jinja's default delimiters, with the white space rules of `transformers`, or where those were followed already with none.
fn syntax(is_trimmed: bool) -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder()
        .trim_blocks(is_trimmed)
        .lstrip_blocks(is_trimmed)
        .keep_trailing_newline(!is_trimmed)
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

#[cfg(test)]
mod tests;

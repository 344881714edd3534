//! Reads `/metrics`: Prometheus' text format, as this router writes it. Pure.

/// One line: labels and a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    labels: Vec<(String, String)>,
    pub value: f64,
}

impl Series {
    /// `None` if it has no such label.
    pub fn label(&self, name: &str) -> Option<&str> {
        let found = self.labels.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| &**value)
    }
}

/// The series whose name `keeps` says yes to, with their names. What is no series is left out.
pub fn series<'t>(
    text: &'t str,
    keeps: impl Fn(&str) -> bool + 't,
) -> impl Iterator<Item = (&'t str, Series)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(move |line| {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let series = keeps(name).then(|| read(&line[name.len()..])).flatten()?;
        Some((name, series))
    })
}

/// What follows a name: `{a="x",b="y"} 1`, or ` 1`.
fn read(rest: &str) -> Option<Series> {
    let (labels, value) = match rest.strip_prefix('{') {
        None => (Vec::new(), rest),
        Some(rest) => labels(rest)?,
    };
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some(Series { labels, value })
}

/// The labels up to `}`, and what follows.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = after.char_indices();
        let end = loop {
            match letters.next()? {
                (_, '\\') => match letters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (at, '"') => break at + 1,
                (_, letter) => value.push(letter),
            }
        };
        labels.push((name.to_owned(), value));
        rest = &after[end..];
    }
}

//! Draws the table. Pure: a frame is made of what is known, whatever the terminal is.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::decisions::{self, Decisions};
use super::figures::Samples;
use super::state::{COLUMNS, State, rows, summary};

const KEYS: &str = "q quit  d decisions  s/S sort  r reverse  / filter  Esc clear  ↑↓ PgUp PgDn";
const KEYS_OF_DECISIONS: &str = "q quit  d workers  / filter  Esc clear  ↑↓ PgUp PgDn  (a sample)";

/// Rows of workers that fit into a terminal of this height.
pub(super) fn shown(height: u16) -> usize {
    // The address, four lines of summary, an empty one, the titles, the keys.
    usize::from(height.saturating_sub(8))
}

/// `problem`: why the last look at the router failed. `decisions`: to be shown instead of the workers.
pub(super) fn draw(
    frame: &mut Frame<'_>,
    url: &str,
    samples: &Samples,
    state: &State,
    decisions: Option<&Decisions>,
    problem: Option<&str>,
) {
    let areas = Layout::vertical([
        Constraint::Length(6),
        Constraint::Min(1),
        Constraint::Length(1),
    ]);
    let [head, body, foot] = areas.areas(frame.area());
    let title = match problem {
        None => Line::from(format!("warmroute {url}")).bold(),
        Some(problem) => Line::from(problem.to_owned()).red(),
    };
    let lines = summary(samples).map(Line::from);
    let lines: Vec<Line<'_>> = std::iter::once(title).chain(lines).collect();
    frame.render_widget(Paragraph::new(lines), head);
    let (table, keys) = match decisions {
        None => (workers(samples, state), KEYS),
        Some(decisions) => (tail(decisions, state), KEYS_OF_DECISIONS),
    };
    frame.render_widget(table, body);
    let foot_text = match (state.is_editing, &*state.filter) {
        (true, filter) => format!("filter: {filter}_   (Enter keeps it, Esc clears it)"),
        (false, "") => keys.to_owned(),
        (false, filter) => format!("filter: {filter}   {keys}"),
    };
    frame.render_widget(Line::from(foot_text).dim(), foot);
}

fn workers(samples: &Samples, state: &State) -> Table<'static> {
    let titles = COLUMNS.iter().map(|(column, title, _)| {
        let style = if *column == state.sort {
            Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
        } else {
            Style::new().add_modifier(Modifier::BOLD)
        };
        Cell::new(*title).style(style)
    });
    let lines = rows(samples, state).into_iter().skip(state.offset);
    let lines = lines.map(|row| {
        let style = if row.is_up {
            Style::new()
        } else {
            Style::new().red()
        };
        Row::new(row.cells).style(style)
    });
    // The worker's name gets what is left of a wider terminal.
    let widths = COLUMNS
        .iter()
        .enumerate()
        .map(|(index, (_, _, width))| match index {
            0 => Constraint::Min(9),
            _ => Constraint::Length(*width as u16),
        });
    Table::new(lines, widths).header(Row::new(titles))
}

fn tail(decisions: &Decisions, state: &State) -> Table<'static> {
    let columns = decisions::COLUMNS;
    let titles = columns.map(|(title, _)| Cell::new(title).style(Style::new().bold()));
    let lines = decisions.rows(&state.filter).into_iter().skip(state.offset);
    let lines = lines.map(|cells| Row::new(cells.clone()));
    // Names get what is left of a wider terminal.
    let widths = columns.map(|(title, width)| match title {
        "WORKER" | "MODEL" => Constraint::Min(width as u16),
        _ => Constraint::Length(width as u16),
    });
    Table::new(lines, widths).header(Row::new(titles))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::cli::top::decisions::tests::two_decisions;
    use crate::cli::top::state::Key;
    use crate::cli::top::state::tests::three_workers;

    fn lines((width, height): (u16, u16), state: &State, problem: Option<&str>) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let samples = three_workers();
        let decisions = state.shows_decisions.then(two_decisions);
        let decisions = decisions.as_ref();
        let drawn = terminal.draw(|frame| {
            draw(
                frame,
                "http://router:9090",
                &samples,
                state,
                decisions,
                problem,
            )
        });
        let buffer = drawn.unwrap().buffer.clone();
        let row = |y| {
            (0..width)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
        };
        (0..height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn everything_fits_into_80_columns() {
        let lines = lines((80, 24), &State::default(), None);
        assert_eq!(lines[0], "warmroute http://router:9090");
        assert!(lines[1].starts_with("ready   workers 1/3 up"), "{lines:#?}");
        assert!(lines[6].starts_with("WORKER"), "{lines:#?}");
        assert!(lines[6].ends_with("EVENTS"), "{lines:#?}");
        let row = lines[8].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(row, "gpu-b both up 3 12k 50 % 4.0 100 ms 198 ms - live");
        assert!(lines[23].starts_with("q quit"), "{lines:#?}");
    }

    #[test]
    fn the_key_d_shows_decisions_and_again_the_workers() {
        let mut state = State::default();
        assert!(!state.on_key(Key::Letter('d'), 3, 17));
        let shown = lines((80, 24), &state, None);
        assert!(shown[1].starts_with("ready   workers 1/3 up"), "{shown:#?}");
        assert!(shown[6].starts_with("TIME      WORKER"), "{shown:#?}");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(&shown[7]),
            "01:02:04Z gpu-p > gpu-b lower cost 400 0 % 97 % llama"
        );
        assert!(shown[8].contains("longest prefix"), "{shown:#?}");
        assert_eq!(shown[9], "");
        assert!(shown[23].starts_with("q quit  d workers"), "{shown:#?}");
        state.filter = "gpu-a".to_owned();
        assert!(lines((80, 24), &state, None)[7].contains("longest prefix"));
        assert!(!state.on_key(Key::Letter('d'), 2, 17));
        assert!(lines((80, 24), &state, None)[6].starts_with("WORKER"));
    }

    #[test]
    fn a_failed_look_shows_why_and_keeps_the_last_numbers() {
        let lines = lines((80, 24), &State::default(), Some("no answer within 10 s"));
        assert_eq!(lines[0], "no answer within 10 s");
        assert!(lines[8].starts_with("gpu-b"), "{lines:#?}");
    }

    #[test]
    fn a_filter_is_shown_while_it_is_written() {
        let state = State {
            is_editing: true,
            filter: "gpu-c".to_owned(),
            ..State::default()
        };
        let lines = lines((80, 24), &state, None);
        assert!(lines[7].starts_with("gpu-c"), "{lines:#?}");
        assert_eq!(lines[8], "");
        assert!(lines[23].starts_with("filter: gpu-c_"), "{lines:#?}");
    }

    #[test]
    fn a_terminal_of_any_size_is_drawn() {
        for size in [(1, 1), (20, 3), (80, 7), (300, 100)] {
            let state = State {
                offset: 2,
                ..State::default()
            };
            assert_eq!(
                lines(size, &state, None).len(),
                usize::from(size.1),
                "{size:?}"
            );
        }
        assert_eq!((shown(24), shown(3)), (16, 0));
    }
}

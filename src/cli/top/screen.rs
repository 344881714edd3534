//! The terminal: keys in, frames out. It is restored however the program ends: by a key, a signal, an error or a panic.

use std::io;
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::admin;
use super::decisions::Decisions;
use super::figures::{Sample, Samples};
use super::state::{Key, State, rows};
use super::tail::Tail;
use super::view::{draw, shown};
use crate::cli::admin_client::AdminClient;
use crate::http::drain::stop_signal;

/// Keys that wait to be taken.
const MAX_KEYS: usize = 64;
/// How often the thread that reads keys looks whether the program has ended.
const POLL: Duration = Duration::from_millis(200);

#[derive(Debug)]
enum Input {
    Key(Key),
    /// Control and C, which is no signal in a raw terminal.
    Interrupt,
    Resized,
}

pub(super) async fn run(client: AdminClient, every: Duration) -> Result<(), String> {
    // Before the screen changes: what is wrong is read on a plain terminal.
    let first = admin::sample(&client).await?;
    // Installs a hook that restores the terminal after a panic.
    let mut terminal = ratatui::try_init().map_err(|error| format!("no terminal: {error}"))?;
    let shown = show(&mut terminal, &client, first, every).await;
    ratatui::restore();
    shown.map_err(|error| error.to_string())
}

async fn show(
    terminal: &mut DefaultTerminal,
    client: &AdminClient,
    first: Sample,
    every: Duration,
) -> io::Result<()> {
    let mut inputs = inputs();
    let mut samples = Samples::default();
    samples.add(first);
    let (mut state, mut problem) = (State::default(), None);
    let mut decisions = Decisions::default();
    let mut reading = None;
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first is at once.
    ticks.tick().await;
    let mut stop = std::pin::pin!(stop_signal());
    // These go on while keys are taken.
    let mut looking = Box::pin(look(ticks, client));
    loop {
        if !state.shows_decisions {
            // Ends the stream.
            reading = None;
        } else if reading.is_none() {
            reading = Some(Box::pin(Tail::default().next(client)));
        }
        let tail = state.shows_decisions.then_some(&decisions);
        terminal.draw(|frame| {
            draw(
                frame,
                &client.base,
                &samples,
                &state,
                tail,
                problem.as_deref(),
            );
        })?;
        let read = async {
            match &mut reading {
                Some(reading) => reading.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            stopped = &mut stop => return stopped,
            input = inputs.recv() => match input {
                None | Some(Input::Interrupt) => return Ok(()),
                Some(Input::Resized) => {}
                Some(Input::Key(key)) => {
                    let height = terminal.size()?.height;
                    let all = if state.shows_decisions {
                        decisions.rows(&state.filter).len()
                    } else {
                        rows(&samples, &state).len()
                    };
                    if state.on_key(key, all, shown(height)) {
                        return Ok(());
                    }
                }
            },
            (tail, events) = read => {
                let applied = events.and_then(|events| {
                    let mut data = events.iter().map(|event| &*event.data);
                    data.try_for_each(|data| {
                        decisions.apply(data).map_err(|error| error.to_string())
                    })
                });
                if let Err(error) = applied {
                    problem = Some(error);
                }
                reading = Some(Box::pin(tail.next(client)));
            }
            (ticks, sample) = &mut looking => {
                looking = Box::pin(look(ticks, client));
                match sample {
                    Ok(sample) => {
                        problem = None;
                        samples.add(sample);
                    }
                    Err(error) => problem = Some(error),
                }
            }
        }
    }
}

async fn look(mut ticks: Interval, client: &AdminClient) -> (Interval, Result<Sample, String>) {
    ticks.tick().await;
    let sample = admin::sample(client).await;
    (ticks, sample)
}

/// Keys are read on a thread of its own, which ends after the receiver is dropped.
fn inputs() -> mpsc::Receiver<Input> {
    let (sender, receiver) = mpsc::channel(MAX_KEYS);
    thread::spawn(move || {
        while !sender.is_closed() {
            let event = match event::poll(POLL) {
                Ok(false) => continue,
                Ok(true) => event::read(),
                Err(error) => Err(error),
            };
            let Ok(event) = event else { return };
            if let Some(input) = input(&event)
                && sender.blocking_send(input).is_err()
            {
                return;
            }
        }
    });
    receiver
}

fn input(event: &Event) -> Option<Input> {
    match event {
        Event::Resize(..) => Some(Input::Resized),
        Event::Key(key) if key.kind != KeyEventKind::Release => of_key(*key),
        _ => None,
    }
}

fn of_key(key: KeyEvent) -> Option<Input> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return (key.code == KeyCode::Char('c')).then_some(Input::Interrupt);
    }
    Some(Input::Key(match key.code {
        KeyCode::Char(letter) => Key::Letter(letter),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        _ => return None,
    }))
}

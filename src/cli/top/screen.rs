//! The terminal: keys in, frames out. It is restored however the program ends: by a key, a signal, an error or a panic.

use std::io;
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use super::admin;
use super::figures::{Sample, Samples};
use super::state::{Key, State, rows};
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
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first is at once.
    ticks.tick().await;
    let mut stop = std::pin::pin!(stop_signal());
    loop {
        terminal.draw(|frame| draw(frame, &client.base, &samples, &state, problem.as_deref()))?;
        let looked = async {
            ticks.tick().await;
            admin::sample(client).await
        };
        tokio::select! {
            stopped = &mut stop => return stopped,
            input = inputs.recv() => match input {
                None | Some(Input::Interrupt) => return Ok(()),
                Some(Input::Resized) => {}
                Some(Input::Key(key)) => {
                    let height = terminal.size()?.height;
                    if state.on_key(key, rows(&samples, &state).len(), shown(height)) {
                        return Ok(());
                    }
                }
            },
            sample = looked => match sample {
                Ok(sample) => {
                    problem = None;
                    samples.add(sample);
                }
                Err(error) => problem = Some(error),
            },
        }
    }
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

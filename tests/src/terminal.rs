//! A terminal that runs a program, and the text on its screen.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::unistd::ttyname;

use crate::{eventually, tied_command, tool};

/// A pseudo-terminal. The program leads its session, and gets SIGWINCH when the size changes.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    name: PathBuf,
    program: Child,
    screen: Screen,
}

/// The screen after the output so far.
#[derive(Debug)]
struct Screen {
    cells: Vec<Vec<char>>,
    row: usize,
    column: usize,
    /// The beginning of an incomplete escape sequence or character.
    rest: Vec<u8>,
}

impl Terminal {
    /// Starts a program on a terminal of this size.
    ///
    /// # Panics
    ///
    /// If no terminal can be opened, or the program cannot be started.
    pub fn start(command: &Command, columns: u16, rows: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None).expect("a terminal");
        fcntl(&master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("it is ours");
        let end = || slave.as_fd().try_clone_to_owned().expect("another descriptor");
        let program = tied_command(&tool("setsid"))
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .env("TERM", "xterm")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("setsid runs");
        let name = ttyname(&slave).expect("a name");
        Terminal { master: master.into(), name, program, screen: Screen::new(columns, rows) }
    }

    /// Waits until `look` returns a value for the lines on the screen. A time-out names `what`.
    pub fn wait_for<T>(&mut self, what: &str, look: impl Fn(&[String]) -> Option<T>) -> T {
        eventually(what, || {
            self.read();
            look(&self.screen.lines())
        })
    }

    /// Presses keys.
    ///
    /// # Panics
    ///
    /// If the program does not read the keys.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("it is read");
    }

    /// Changes the size of the terminal, as when a window is resized.
    ///
    /// # Panics
    ///
    /// If stty fails.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        // Output for the old size belongs to the old screen.
        self.read();
        self.screen = Screen::new(columns, rows);
        let mut stty = Command::new(tool("stty"));
        stty.arg("-F").arg(&self.name);
        stty.args(["cols", &columns.to_string(), "rows", &rows.to_string()]);
        assert!(stty.status().expect("stty runs").success());
    }

    /// Waits for the program's end.
    ///
    /// # Panics
    ///
    /// If it does not end.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the program's end", || {
            self.read();
            self.program.try_wait().expect("it was started here")
        })
    }

    fn read(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            match self.master.read(&mut buffer) {
                Ok(0) => return,
                Ok(len) => self.screen.write(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // No output now; EIO: the program has ended.
                Err(_) => return,
            }
        }
    }
}

impl Screen {
    fn new(columns: u16, rows: u16) -> Self {
        let cells = vec![vec![' '; columns.into()]; rows.into()];
        Screen { cells, row: 0, column: 0, rest: Vec::new() }
    }

    fn lines(&self) -> Vec<String> {
        self.cells.iter().map(|row| row.iter().collect::<String>().trim_end().to_owned()).collect()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.rest);
        let whole = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).expect("it is"),
        };
        let mut text = whole;
        while let Some(c) = text.chars().next() {
            if c != '\x1b' {
                self.put(c);
                text = &text[c.len_utf8()..];
                continue;
            }
            // ESC [ parameters letter
            let end = text.char_indices().skip(2).find(|(_, c)| ('@'..='~').contains(c));
            let Some((end, letter)) = end else { break };
            self.obey(letter, &text[2..end]);
            text = &text[end + 1..];
        }
        let taken = whole.len() - text.len();
        self.rest = bytes[taken..].to_vec();
    }

    fn obey(&mut self, letter: char, parameters: &str) {
        match letter {
            'H' => {
                let mut numbers = parameters.split(';').map(|text| text.parse().unwrap_or(1usize));
                let mut number = || numbers.next().unwrap_or(1).saturating_sub(1);
                (self.row, self.column) = (number(), number());
            }
            'J' => self.cells.iter_mut().for_each(|row| row.fill(' ')),
            // Colours and modes.
            _ => {}
        }
    }

    fn put(&mut self, c: char) {
        if let Some(cell) = self.cells.get_mut(self.row).and_then(|row| row.get_mut(self.column)) {
            *cell = c;
        }
        self.column += 1;
    }
}

//! A driver's log: passed on line by line, and remembered for the error that may follow.

use std::collections::VecDeque;
use std::io::{self, PipeReader, Read};
use std::mem;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Takes each line of a driver's log, without its end, on a thread of its own. A sink that waits makes the driver wait,
/// once the pipe between them is full.
pub type LogSink = Arc<dyn Fn(&str) + Send + Sync>;

/// Receives each line of the drivers' logs, with the replica's number, on separate threads. See [`LogSink`].
pub type ServiceLog = Arc<dyn Fn(usize, &str) + Send + Sync>;

/// Lines that an error shows.
const KEPT: usize = 25;
/// A line that is longer is cut into several.
const LONGEST: usize = 4096;

/// The end of a log that is being read.
#[derive(Debug)]
pub(crate) struct Log {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Closed when the pipe is at its end.
    ended: Receiver<()>,
}

impl Log {
    /// Reads `pipe` to its end, by a thread.
    pub(crate) fn read(mut pipe: PipeReader, sink: LogSink) -> io::Result<Self> {
        let lines = Arc::<Mutex<VecDeque<String>>>::default();
        let (sender, ended) = mpsc::channel();
        let kept = Arc::clone(&lines);
        let reader = thread::Builder::new().name("pie-driver-log".to_owned());
        reader.spawn(move || {
            let _sender = sender;
            let mut splitter = Splitter::default();
            let mut bytes = [0; 1 << 12];
            while let Ok(count @ 1..) = retry(|| pipe.read(&mut bytes)) {
                splitter.push(&bytes[..count], |line| keep(&kept, &sink, line));
            }
            splitter.finish(|line| keep(&kept, &sink, line));
        })?;
        Ok(Self { lines, ended })
    }

    /// The last lines, once the log is at its end, or the time is over.
    pub(crate) fn tail(&self, limit: Duration) -> String {
        self.wait(limit);
        let lines = lock(&self.lines);
        lines
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Waits until every line has been passed on, at most so long: a process of the driver's may keep the pipe open.
    pub(crate) fn wait(&self, limit: Duration) {
        let _ = self.ended.recv_timeout(limit);
    }
}

fn keep(lines: &Mutex<VecDeque<String>>, sink: &LogSink, line: &str) {
    {
        let mut lines = lock(lines);
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }
    sink(line);
}

fn lock(lines: &Mutex<VecDeque<String>>) -> MutexGuard<'_, VecDeque<String>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

fn retry(mut read: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match read() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Cuts bytes into lines. Progress bars end theirs by a carriage return.
#[derive(Default)]
struct Splitter(Vec<u8>);

impl Splitter {
    fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        for &byte in bytes {
            let ends = matches!(byte, b'\n' | b'\r');
            if !ends {
                self.0.push(byte);
            }
            if ends || self.0.len() == LONGEST {
                self.finish(&mut line);
            }
        }
    }

    /// Passes on what there is, if it is not blank.
    fn finish(&mut self, mut line: impl FnMut(&str)) {
        let bytes = mem::take(&mut self.0);
        let text = String::from_utf8_lossy(&bytes);
        if !text.trim().is_empty() {
            line(text.trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_bytes_are() {
        let text = "one\n\ntwo \r\n 50%\r100%\n\u{e9}\u{20ac}\nlast";
        for size in 1..9 {
            let mut found = Vec::new();
            let mut splitter = Splitter::default();
            for part in text.as_bytes().chunks(size) {
                splitter.push(part, |line| found.push(line.to_owned()));
            }
            splitter.finish(|line| found.push(line.to_owned()));
            assert_eq!(found, ["one", "two", " 50%", "100%", "é€", "last"]);
        }
    }

    #[test]
    fn a_line_without_an_end_is_cut() {
        let mut lengths = Vec::new();
        let mut splitter = Splitter::default();
        splitter.push(&[b'x'; 2 * LONGEST + 1], |line| lengths.push(line.len()));
        splitter.finish(|line| lengths.push(line.len()));
        assert_eq!(lengths, [LONGEST, LONGEST, 1]);
    }

    #[test]
    fn the_last_lines_are_kept_and_all_are_passed_on() {
        let (read, mut write) = io::pipe().unwrap();
        let passed = Arc::<Mutex<VecDeque<String>>>::default();
        let sink = Arc::clone(&passed);
        let log = Log::read(
            read,
            Arc::new(move |line| lock(&sink).push_back(line.to_owned())),
        );
        for number in 0..40 {
            writeln!(write, "line {number}").unwrap();
        }
        drop(write);
        let tail = log.unwrap().tail(Duration::from_mins(1));
        assert!(
            tail.starts_with("line 15\n") && tail.ends_with("\nline 39"),
            "{tail}"
        );
        assert_eq!(lock(&passed).len(), 40);
    }
}

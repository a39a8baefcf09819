//! Chrome trace of steps.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::error::EngineError;
use crate::link::StepTiming;

/// Thread ids in the trace: one row each.
const STEPS: u32 = 1;
const HOST: u32 = 2;

/// Settings of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceSettings {
    /// The file; replicas after the first append `.N`.
    pub path: PathBuf,
    /// Steps to skip.
    pub skip: u64,
    /// Steps to write, after which the trace ends; `None` for no limit.
    pub steps: Option<u64>,
}

/// Summary of a trace that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceSummary {
    /// The file.
    pub path: PathBuf,
    /// Steps in it.
    pub steps: u64,
    /// The error that ended it early.
    pub failure: Option<String>,
}

/// A trace under way.
#[derive(Debug)]
pub(crate) struct StepTrace {
    file: BufWriter<File>,
    origin: Instant,
    skip: u64,
    left: Option<u64>,
    end: TraceSummary,
}

impl StepTrace {
    /// Creates the file.
    pub(crate) fn create(settings: &TraceSettings, replica: usize) -> Result<Self, EngineError> {
        let path = match replica {
            0 => settings.path.clone(),
            number => with_number(&settings.path, number),
        };
        Self::begin(settings, replica, &path).map_err(|source| EngineError::File { path, source })
    }

    fn begin(settings: &TraceSettings, replica: usize, path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        let unix_ns = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        write!(
            file,
            "[\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{replica},\"args\":{{\"name\":\"pie-engine replica {replica}\"}}}}"
        )?;
        for (row, name) in [(STEPS, "steps"), (HOST, "host")] {
            write!(
                file,
                ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{replica},\"tid\":{row},\"args\":{{\"name\":\"{name}\"}}}}"
            )?;
        }
        write!(
            file,
            ",\n{{\"name\":\"wall clock\",\"ph\":\"i\",\"s\":\"g\",\"pid\":{replica},\"tid\":{STEPS},\"ts\":0,\"args\":{{\"unix_ns\":{unix_ns}}}}}"
        )?;
        file.flush()?;
        Ok(Self {
            file,
            origin: Instant::now(),
            skip: settings.skip,
            left: settings.steps,
            end: TraceSummary {
                path: path.to_owned(),
                ..TraceSummary::default()
            },
        })
    }

    /// Writes a step. Returns false when the trace has ended.
    pub(crate) fn step(&mut self, replica: usize, exchange: &StepTiming) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return true;
        }
        if self.left == Some(0) {
            return false;
        }
        if let Err(error) = self.write(replica, exchange) {
            self.end.failure = Some(error.to_string());
            return false;
        }
        self.end.steps += 1;
        self.left = self.left.map(|left| left - 1);
        self.left != Some(0)
    }

    fn write(&mut self, replica: usize, exchange: &StepTiming) -> io::Result<()> {
        let sent_us = exchange
            .sent
            .saturating_duration_since(self.origin)
            .as_nanos() as f64
            / 1e3;
        let took_us = exchange.round_trip_ns as f64 / 1e3;
        let host_us = exchange.client_ns as f64 / 1e3;
        let (requests, tokens) = (exchange.requests, exchange.tokens);
        let name = if tokens > requests {
            "prompt"
        } else {
            "decode"
        };
        if exchange.client_ns > 0 {
            let from_us = (sent_us - host_us).max(0.0);
            write!(
                self.file,
                ",\n{{\"name\":\"host\",\"ph\":\"X\",\"pid\":{replica},\"tid\":{HOST},\"ts\":{from_us:.3},\"dur\":{host_us:.3}}}"
            )?;
        }
        write!(
            self.file,
            ",\n{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":{replica},\"tid\":{STEPS},\"ts\":{sent_us:.3},\"dur\":{took_us:.3},\
             \"args\":{{\"requests\":{requests},\"tokens\":{tokens},\"bytes\":{}",
            exchange.request_bytes
        )?;
        if let Some(probes) = &exchange.probes {
            let parts = serde_json::to_string(probes)?;
            write!(self.file, ",\"driver_us\":{parts}")?;
        }
        write!(self.file, "}}}}")
    }

    /// Closes the file.
    pub(crate) fn close(mut self) -> TraceSummary {
        let closed = writeln!(self.file, "\n]").and_then(|()| self.file.flush());
        if let Err(error) = closed {
            self.end.failure.get_or_insert(error.to_string());
        }
        self.end
    }
}

fn with_number(path: &Path, number: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::reply::Probes;

    #[test]
    fn the_file_has_the_steps_that_were_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let settings = TraceSettings {
            path: path.clone(),
            skip: 1,
            steps: Some(2),
        };
        let mut trace = StepTrace::create(&settings, 0).unwrap();
        let exchange = |requests, tokens| StepTiming {
            sent: Instant::now(),
            round_trip_ns: 2_500_000,
            client_ns: 3_000,
            request_bytes: 100,
            requests,
            tokens,
            probes: (requests == 3).then(Probes::default),
        };
        assert!(trace.step(0, &exchange(1, 1)));
        assert!(trace.step(0, &exchange(2, 2)));
        assert!(!trace.step(0, &exchange(3, 40)));
        assert!(!trace.step(0, &exchange(4, 4)));
        let end = trace.close();
        assert_eq!((end.steps, end.failure, &end.path), (2, None, &path));
        let text = std::fs::read_to_string(&path).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
        let steps: Vec<_> = events
            .iter()
            .filter(|event| event["tid"] == STEPS && event["ph"] == "X")
            .map(|event| {
                (
                    event["name"].as_str().unwrap(),
                    event["args"]["requests"].as_u64(),
                )
            })
            .collect();
        assert_eq!(steps, [("decode", Some(2)), ("prompt", Some(3))]);
        assert!(events.last().unwrap()["args"]["driver_us"]["plan"].is_u64());
        let missing = TraceSettings {
            path: folder.path().join("no/trace.json"),
            ..settings
        };
        let refused = StepTrace::create(&missing, 2).unwrap_err().to_string();
        assert!(refused.contains("no/trace.json.2"), "{refused}");
    }
}

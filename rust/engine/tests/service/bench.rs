//! A service over a stand-in for the driver, and the tokens that the stand-in says.

use std::collections::HashMap;
use std::fs;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::driver;
use pie_engine::{
    DriverSettings, FinishReason, NewRequest, OutputDelta, Policy, Sampler, Service,
    ServiceSettings,
};
use tempfile::TempDir;

/// No test takes nearly as long.
pub(crate) const WATCHDOG: Duration = Duration::from_mins(2);

pub(crate) const GREEDY: Sampler = Sampler::TopP {
    temperature: 0.0,
    p: 1.0,
};

/// A service over drivers of one behaviour.
pub(crate) struct Bench {
    pub(crate) service: Service,
    pub(crate) folder: TempDir,
    pub(crate) lines: Arc<Mutex<Vec<String>>>,
}

/// What came of one sequence.
#[derive(Default)]
pub(crate) struct Story {
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Option<FinishReason>,
    pub(crate) cached: u32,
    pub(crate) prompt_logprobs: Vec<u32>,
    pub(crate) logprobs: Vec<u32>,
}

pub(crate) type Stories = HashMap<(u64, u32), Story>;

impl Bench {
    pub(crate) fn start(behaviour: &str, change: impl FnOnce(&mut ServiceSettings)) -> Self {
        let folder = TempDir::new().unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let mut driver =
            DriverSettings::new(driver::script(folder.path(), behaviour), folder.path());
        driver.devices = vec!["cpu".to_owned()];
        driver.ready_timeout = WATCHDOG;
        let log = Arc::clone(&lines);
        let mut settings = ServiceSettings {
            log: Arc::new(move |replica, line| {
                log.lock().unwrap().push(format!("{replica}: {line}"));
            }),
            ..ServiceSettings::new(driver)
        };
        settings.scheduler.policy = Policy::Lpm;
        settings.scheduler.chunk_tokens = 24;
        change(&mut settings);
        let service = Service::start(&settings).unwrap();
        Self {
            service,
            folder,
            lines,
        }
    }

    pub(crate) fn ready(behaviour: &str) -> Self {
        let bench = Self::start(behaviour, |_| ());
        bench.wait_ready();
        bench
    }

    pub(crate) fn wait_ready(&self) {
        assert!(self.service.wait_ready(WATCHDOG).unwrap(), "{}", self.log());
    }

    pub(crate) fn submit(&self, prompt: &[u32], output: u32) -> u64 {
        let arrival = NewRequest::new(0, prompt.to_vec(), GREEDY, output);
        self.service.submit(arrival, None).unwrap()
    }

    /// Everything of these requests' sequences, of which there are so many.
    pub(crate) fn collect(&self, sequences: usize) -> Stories {
        let mut stories = Stories::new();
        self.collect_into(&mut stories, sequences);
        stories
    }

    pub(crate) fn collect_into(&self, stories: &mut Stories, sequences: usize) {
        let started = Instant::now();
        let ended = |stories: &Stories| stories.values().filter(|s| s.end.is_some()).count();
        while ended(stories) < sequences {
            assert!(started.elapsed() < WATCHDOG, "hangs; {}", self.log());
            for delta in self.service.poll(Duration::from_secs(1)) {
                add(stories, delta);
            }
        }
    }

    pub(crate) fn log(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Process ids of all drivers so far.
    pub(crate) fn starts(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.folder.path().join("starts")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    pub(crate) fn restarts(&self) -> u64 {
        self.service
            .stats()
            .iter()
            .map(|stats| stats.restarts)
            .sum()
    }
}

pub(crate) fn add(stories: &mut Stories, delta: OutputDelta) {
    let story = stories.entry((delta.request, delta.sample)).or_default();
    assert_eq!(story.end, None, "an output comes after the end");
    story.tokens.extend(delta.tokens);
    story.prompt_logprobs.extend(delta.prompt_logprobs);
    story.logprobs.extend(delta.logprobs);
    story.end = delta.finish;
    story.cached = delta.cached_tokens;
}

/// What a request must bring.
pub(crate) fn expected(prompt: &[u32], output: u32) -> Vec<u32> {
    expected_by(-1, prompt, output)
}

/// What a request with an adapter must bring.
pub(crate) fn expected_by(adapter: i64, prompt: &[u32], output: u32) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..output {
        text.push(driver::next_by(adapter, &text));
    }
    text.split_off(prompt.len())
}

/// Prompts that begin like others, of different lengths.
pub(crate) fn prompts(count: u32) -> Vec<(Vec<u32>, u32)> {
    let prompt = |index: u32| {
        let shared = (0..8 + 4 * (index % 3)).map(|at| (at * 7 + index % 2) % 90);
        let own = (0..index * 5 % 17).map(|at| (at * 3 + index) % 90);
        (shared.chain(own).collect(), 3 + index * 7 % 23)
    };
    (0..count).map(prompt).collect()
}

/// Has the prompts served, and compares every token with the rule.
pub(crate) fn serve(bench: &Bench, prompts: &[(Vec<u32>, u32)]) -> Stories {
    let ids: Vec<u64> = prompts
        .iter()
        .map(|(prompt, output)| bench.submit(prompt, *output))
        .collect();
    let stories = bench.collect(ids.len());
    for (id, (prompt, output)) in ids.iter().zip(prompts) {
        let story = &stories[&(*id, 0)];
        assert_eq!(story.end, Some(FinishReason::Length), "{}", bench.log());
        assert_eq!(story.tokens, expected(prompt, *output), "of {prompt:?}");
    }
    stories
}

pub(crate) fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie is waited for by who started it.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

pub(crate) fn kill(pid: u32) {
    let killed = Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
}

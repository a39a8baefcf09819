//! What the driver is started with, from the command line.

use std::time::Duration;

use clap::ValueEnum;
use pie_engine::DriverSettings;
use serde::Serialize;
use toml::{Table, Value};

use crate::args::DriverArgs;
use crate::error::LoadError;

/// How long both sides of the ring spin before they park.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Profile {
    /// Never park: needs a free core for each side.
    Latency,
    /// Spin for 1 ms, then park.
    Balanced,
    /// Park at once.
    Power,
}

impl Profile {
    const fn spin_budget_us(self) -> u64 {
        match self {
            Self::Latency => u64::MAX,
            Self::Balanced => 1000,
            Self::Power => 0,
        }
    }
}

/// The driver of these arguments.
pub(crate) fn settings(args: &DriverArgs) -> Result<DriverSettings, LoadError> {
    Ok(DriverSettings {
        devices: args.device.split(',').map(str::to_owned).collect(),
        dtype: args.dtype.clone(),
        seed: args.seed,
        spin_budget_us: args.profile.spin_budget_us(),
        options: options(args)?,
        ready_timeout: Duration::from_secs_f64(args.ready_timeout_s),
        answer_timeout: Duration::from_secs_f64(args.timeout_s),
        ..DriverSettings::new(&args.python, &args.model)
    })
}

/// `[driver.options]`: the page size, and the fragments that the user gave.
fn options(args: &DriverArgs) -> Result<Table, LoadError> {
    let page_size = Value::Integer(args.page_size.into());
    let mut options = Table::from_iter([("page_size".to_owned(), page_size)]);
    for fragment in &args.options {
        let table: Table =
            fragment
                .parse()
                .map_err(|error: toml::de::Error| LoadError::Option {
                    fragment: fragment.clone(),
                    problem: error.message().to_owned(),
                })?;
        options.extend(table);
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Args;

    fn args(more: &[&str]) -> DriverArgs {
        let line = ["pie_load", "steps", "--model", "/m/qwen"]
            .iter()
            .chain(more);
        Args::try_parse_from(line).unwrap().driver
    }

    #[test]
    fn options_are_the_users_and_the_loads_own() {
        let args = args(&[
            "--option",
            "attention_backend=\"triton\"",
            "--option",
            "cuda_graph_bs_decode=[1, 2]",
        ]);
        let settings = settings(&args).unwrap();
        assert_eq!(settings.spin_budget_us, u64::MAX);
        assert_eq!(settings.devices, ["cuda:0"]);
        let options = &settings.options;
        assert_eq!(options["page_size"].as_integer(), Some(16));
        assert_eq!(options["attention_backend"].as_str(), Some("triton"));
        assert_eq!(options["cuda_graph_bs_decode"][1].as_integer(), Some(2));
    }

    #[test]
    fn profiles_and_devices() {
        let args = args(&["--profile", "balanced", "--device", "cuda:2,cuda:3"]);
        let settings = settings(&args).unwrap();
        assert_eq!(settings.spin_budget_us, 1000);
        assert_eq!(settings.devices, ["cuda:2", "cuda:3"]);
        assert_eq!(Profile::Power.spin_budget_us(), 0);
    }

    #[test]
    fn a_bare_string_is_refused_with_a_hint() {
        let args = args(&["--option", "attention_backend=triton"]);
        let error = options(&args).unwrap_err().to_string();
        assert!(error.contains("strings need quotes"), "{error}");
    }
}

//! The driver's configuration file, with every key that the Pie runtime writes.

use std::path::Path;

use clap::ValueEnum;
use pie_ring::Wait;
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

    pub(crate) fn wait(self) -> Wait {
        Wait::from_spin_budget_us(self.spin_budget_us())
    }

    /// As the runtime writes it: a number beyond the signed range becomes a text.
    fn value(self) -> Value {
        let budget = self.spin_budget_us();
        i64::try_from(budget).map_or_else(|_| Value::String(budget.to_string()), Value::Integer)
    }
}

/// `[driver.options]`: the page size, the fragments that the user gave, and the trace's path.
pub(crate) fn options(args: &DriverArgs, trace: Option<&Path>) -> Result<Table, LoadError> {
    let mut options = table([("page_size", Value::Integer(args.page_size.into()))]);
    if let Some(path) = trace {
        options.insert("trace_file".to_owned(), text(path));
    }
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

/// The whole file.
pub(crate) fn driver_toml(args: &DriverArgs, group: u32, options: Table) -> String {
    let name = args
        .model
        .file_name()
        .map_or_else(|| text(&args.model), |name| text(name.as_ref()));
    let model = table([
        ("name", name),
        ("hf_repo", text(&args.model)),
        ("snapshot_dir", text(&args.model)),
    ]);
    let devices: Vec<_> = args.device.split(',').map(str::to_owned).collect();
    let ranks = i64::try_from(devices.len()).unwrap_or(i64::MAX);
    let port = 29_500 + i64::from(std::process::id() % 1000);
    let driver = table([
        ("group_id", Value::Integer(group.into())),
        (
            "device",
            Value::Array(devices.into_iter().map(Value::String).collect()),
        ),
        ("tensor_parallel_size", Value::Integer(ranks)),
        ("activation_dtype", Value::String(args.dtype().to_owned())),
        ("random_seed", Value::Integer(args.seed)),
        ("master_port", Value::Integer(port)),
        ("ready_timeout_s", Value::Float(args.ready_timeout_s)),
        ("spin_budget_us", args.profile.value()),
        ("options", Value::Table(options)),
    ]);
    table([
        ("model", Value::Table(model)),
        ("driver", Value::Table(driver)),
    ])
    .to_string()
}

fn table<const N: usize>(entries: [(&str, Value); N]) -> Table {
    entries
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect()
}

fn text(path: &Path) -> Value {
    Value::String(path.display().to_string())
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

    fn written(more: &[&str]) -> Table {
        let args = args(more);
        let options = options(&args, Some(Path::new("/t.json"))).unwrap();
        driver_toml(&args, 2_147_483_650, options).parse().unwrap()
    }

    #[test]
    fn the_file_has_what_the_runtime_writes() {
        let file = written(&[
            "--option",
            "attention_backend=\"triton\"",
            "--option",
            "cuda_graph_bs_decode=[1, 2]",
        ]);
        let (model, driver) = (&file["model"], &file["driver"]);
        assert_eq!(model["snapshot_dir"].as_str(), Some("/m/qwen"));
        assert_eq!(model["name"].as_str(), Some("qwen"));
        assert_eq!(driver["group_id"].as_integer(), Some(2_147_483_650));
        assert_eq!(driver["device"][0].as_str(), Some("cuda:0"));
        assert_eq!(driver["activation_dtype"].as_str(), Some("bfloat16"));
        assert_eq!(
            driver["spin_budget_us"].as_str(),
            Some("18446744073709551615")
        );
        let options = &driver["options"];
        assert_eq!(options["page_size"].as_integer(), Some(16));
        assert_eq!(options["attention_backend"].as_str(), Some("triton"));
        assert_eq!(options["cuda_graph_bs_decode"][1].as_integer(), Some(2));
        assert_eq!(options["trace_file"].as_str(), Some("/t.json"));
    }

    #[test]
    fn profiles_and_devices() {
        let file = written(&["--profile", "balanced", "--device", "cpu"]);
        assert_eq!(file["driver"]["spin_budget_us"].as_integer(), Some(1000));
        assert_eq!(file["driver"]["activation_dtype"].as_str(), Some("float32"));
        assert_eq!(Profile::Power.wait(), Wait::Park);
        assert_eq!(Profile::Latency.wait(), Wait::Spin);
    }

    #[test]
    fn a_bare_string_is_refused_with_a_hint() {
        let args = args(&["--option", "attention_backend=triton"]);
        let error = options(&args, None).unwrap_err().to_string();
        assert!(error.contains("strings need quotes"), "{error}");
    }
}

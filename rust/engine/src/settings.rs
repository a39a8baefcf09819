//! What a driver is started with, and the file that tells it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pie_ring::{ClientConfig, Wait};
use toml::{Table, Value};

/// A driver's configuration, with the defaults of its protocol. See [`DriverSettings::new`].
#[derive(Clone, Debug)]
pub struct DriverSettings {
    /// The interpreter, which has the package.
    pub python: PathBuf,
    /// The driver's package, which it runs by `-m`.
    pub package: String,
    /// Folder that the driver's interpreter searches before all others, for a library that is not in its environment.
    pub library_path: Option<PathBuf>,
    /// Folder of the model's snapshot.
    pub model: PathBuf,
    /// `cuda:N` or `cpu`; several devices share one model.
    pub devices: Vec<String>,
    /// Type of the activations. `None` for bfloat16, on the CPU float32, where half precision is emulated.
    pub dtype: Option<String>,
    /// Seed of all sampling.
    pub seed: i64,
    /// Microseconds that both sides of the ring spin before they park; [`u64::MAX`] never to park.
    pub spin_budget_us: u64,
    /// KV pages of the driver that this one replaces, so that it has as many if they fit; 0 if it replaces none.
    pub kept_pages: u32,
    /// Most KV pages of the pool, one context at least; `None` for as many as fit.
    pub max_pages: Option<u32>,
    /// The table `[driver.options]`.
    pub options: Table,
    /// Limit for the start.
    pub ready_timeout: Duration,
    /// Limit for the answer to a frame: the watchdog that restarts a driver whose step hangs (`--watchdog-timeout`).
    pub answer_timeout: Duration,
    /// How long a driver may take to end after SIGTERM, before it is killed.
    pub stop_timeout: Duration,
}

impl DriverSettings {
    /// Settings for one model on one GPU.
    pub fn new(python: impl Into<PathBuf>, model: impl Into<PathBuf>) -> Self {
        Self {
            python: python.into(),
            package: "pie_driver_sglang".to_owned(),
            library_path: None,
            model: model.into(),
            devices: vec!["cuda:0".to_owned()],
            dtype: None,
            seed: 42,
            spin_budget_us: 1000,
            kept_pages: 0,
            max_pages: None,
            options: Table::new(),
            ready_timeout: Duration::from_mins(20),
            answer_timeout: Duration::from_mins(1),
            stop_timeout: Duration::from_secs(5),
        }
    }

    /// How this side of the ring waits.
    pub(crate) fn client(&self) -> ClientConfig {
        ClientConfig {
            wait: Wait::from_spin_budget_us(self.spin_budget_us),
            timeout: self.answer_timeout,
        }
    }

    /// The file's text, with every key that the Pie runtime writes.
    pub(crate) fn to_toml(&self, group: u32) -> String {
        let name = self
            .model
            .file_name()
            .map_or_else(|| text(&self.model), |name| text(name.as_ref()));
        let model = table([
            ("name", name),
            ("hf_repo", text(&self.model)),
            ("snapshot_dir", text(&self.model)),
        ]);
        let devices = self.devices.iter().cloned().map(Value::String);
        let ranks = i64::try_from(self.devices.len()).unwrap_or(i64::MAX);
        // Ranks of one host meet without a port; the protocol wants one all the same.
        let port = 29_500 + i64::from(group % 1000);
        let mut driver = table([
            ("group_id", Value::Integer(group.into())),
            ("device", Value::Array(devices.collect())),
            ("tensor_parallel_size", Value::Integer(ranks)),
            ("activation_dtype", Value::String(self.dtype().to_owned())),
            ("random_seed", Value::Integer(self.seed)),
            ("master_port", Value::Integer(port)),
            (
                "ready_timeout_s",
                Value::Float(self.ready_timeout.as_secs_f64()),
            ),
            ("spin_budget_us", spin(self.spin_budget_us)),
            ("options", Value::Table(self.options.clone())),
        ]);
        if self.kept_pages > 0 {
            driver.insert("kept_pages".to_owned(), self.kept_pages.into());
        }
        if let Some(pages) = self.max_pages {
            driver.insert("max_pages".to_owned(), pages.into());
        }
        table([
            ("model", Value::Table(model)),
            ("driver", Value::Table(driver)),
        ])
        .to_string()
    }

    fn dtype(&self) -> &str {
        let on_cpu = self
            .devices
            .first()
            .is_some_and(|device| device.starts_with("cpu"));
        let default = if on_cpu { "float32" } else { "bfloat16" };
        self.dtype.as_deref().unwrap_or(default)
    }
}

/// A number beyond the signed range becomes a text, as the protocol has it.
fn spin(budget_us: u64) -> Value {
    i64::try_from(budget_us).map_or_else(|_| Value::String(budget_us.to_string()), Value::Integer)
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
    use super::*;

    fn written(settings: &DriverSettings) -> Table {
        settings.to_toml(2_147_483_650).parse().unwrap()
    }

    #[test]
    fn the_file_has_what_the_runtime_writes() {
        let mut settings = DriverSettings::new("python3", "/m/qwen");
        settings.options = "attention_backend = \"triton\"\ncuda_graph_bs_decode = [1, 2]"
            .parse()
            .unwrap();
        settings.spin_budget_us = u64::MAX;
        let file = written(&settings);
        let (model, driver) = (&file["model"], &file["driver"]);
        assert_eq!(model["snapshot_dir"].as_str(), Some("/m/qwen"));
        assert_eq!(model["name"].as_str(), Some("qwen"));
        assert_eq!(driver["group_id"].as_integer(), Some(2_147_483_650));
        assert_eq!(driver["device"][0].as_str(), Some("cuda:0"));
        assert_eq!(driver["activation_dtype"].as_str(), Some("bfloat16"));
        assert_eq!(driver["random_seed"].as_integer(), Some(42));
        assert_eq!(
            driver["spin_budget_us"].as_str(),
            Some("18446744073709551615")
        );
        let options = &driver["options"];
        assert_eq!(options["attention_backend"].as_str(), Some("triton"));
        assert_eq!(options["cuda_graph_bs_decode"][1].as_integer(), Some(2));
    }

    #[test]
    fn devices_and_waiting() {
        let mut settings = DriverSettings::new("python3", "/m/qwen");
        assert_eq!(
            settings.client().wait,
            Wait::SpinThenPark(Duration::from_millis(1))
        );
        settings.devices = vec!["cpu".to_owned()];
        settings.spin_budget_us = 0;
        let driver = &written(&settings)["driver"];
        assert_eq!(driver["activation_dtype"].as_str(), Some("float32"));
        assert_eq!(driver["spin_budget_us"].as_integer(), Some(0));
        assert_eq!(settings.client().wait, Wait::Park);
        settings.dtype = Some("bfloat16".to_owned());
        let driver = &written(&settings)["driver"];
        assert_eq!(driver["activation_dtype"].as_str(), Some("bfloat16"));
    }
}

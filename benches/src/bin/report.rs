//! Merges the rows of all bench programs into `target/bench.json` and prints them.

use std::error::Error;
use std::fs;

use pie_benches::conditions::Machine;
use pie_benches::report::{self, Row};

const DISTURBED: &str = "warning: the machine was not idle (involuntary context switches in samples). \
     Do not trust:";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = report::folder();
    let rows = report::read(&folder)?;
    report::write_medians(&folder, &rows)?;
    let text = text(&rows);
    fs::write(folder.with_extension("txt"), &text)?;
    print!("{text}");
    Ok(())
}

/// The machine, what makes rows invalid, the table.
fn text(rows: &[Row]) -> String {
    let doubtful: Vec<_> = rows.iter().filter_map(Row::warning).collect();
    let warning = match doubtful.as_slice() {
        [] => String::new(),
        doubtful => format!("{DISTURBED}\n  {}\n", doubtful.join("\n  ")),
    };
    let (machine, table) = (Machine::now(), report::table(rows));
    format!("{machine}\n{warning}{table}\n")
}

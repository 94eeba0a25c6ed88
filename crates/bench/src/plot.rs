//! Plots: bars in groups, as SVG.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::figures::{median, range};

/// A bar: the median of several rounds, with the least and the most of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bar {
    /// Its height.
    pub(crate) median: f64,
    /// Where its whisker ends below.
    pub(crate) least: f64,
    /// Where its whisker ends above.
    pub(crate) most: f64,
}

impl Bar {
    /// Of the figures of several rounds.
    pub(crate) fn of(rounds: &[f64]) -> Self {
        let (least, most) = range(rounds.iter().copied());
        Bar { median: median(rounds.iter().copied()), least, most }
    }
}

/// Groups of bars that stand side by side.
#[derive(Debug, Clone)]
pub(crate) struct Bars {
    /// What is shown.
    pub(crate) title: String,
    /// What the height is, with its unit.
    pub(crate) unit: String,
    /// What the bars of each group are.
    pub(crate) series: Vec<String>,
    /// The groups, with a bar (or none) per series.
    pub(crate) groups: Vec<(String, Vec<Option<Bar>>)>,
}

/// Without what the names of the groups need beyond their first line.
const SIZE: (u32, u32) = (900, 420);
/// Of the groups' names.
const LINE: u32 = 15;
const FONT: &str = "sans-serif";
const GREY: RGBColor = RGBColor(110, 110, 110);
/// Colours that differ also for those who do not see red and green apart (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(153, 153, 153),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];

impl Bars {
    /// Draws them into `file`.
    pub(crate) fn draw(&self, file: &Path) -> Result<()> {
        let size = (SIZE.0, SIZE.1 + self.extra_lines() * LINE);
        let root = SVGBackend::new(file, size).into_drawing_area();
        self.draw_on(&root)
            .and_then(|()| root.present().map_err(|error| anyhow!("{error}")))
            .with_context(|| format!("drawing {}", file.display()))
    }

    fn draw_on(&self, root: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let failed = |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{error}");
        root.fill(&WHITE).map_err(failed)?;
        let (heading, body) = root.split_vertically(58);
        let title = (FONT, 18).into_font().color(&BLACK);
        heading.draw_text(&self.title, &title, (12, 8)).map_err(failed)?;
        self.draw_legend(&heading)?;
        let groups = self.groups.len() as f64;
        let mut chart = ChartBuilder::on(&body)
            .margin(10)
            .x_label_area_size(34 + self.extra_lines() * LINE)
            .y_label_area_size(72)
            .build_cartesian_2d(0.0..groups, self.heights())
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .light_line_style(WHITE)
            .y_desc(&self.unit)
            .y_label_formatter(&|value| short(*value))
            .label_style((FONT, 13))
            .draw()
            .map_err(failed)?;
        let area = chart.plotting_area();
        for (group, (name, bars)) in self.groups.iter().enumerate() {
            for (series, bar) in bars.iter().enumerate() {
                let Some(bar) = bar else { continue };
                let x = self.places(group, series);
                let colour = COLOURS[series % COLOURS.len()];
                let corners = [(x.start, 0.0), (x.end, bar.median)];
                area.draw(&Rectangle::new(corners, colour.filled())).map_err(failed)?;
                let middle = f64::midpoint(x.start, x.end);
                let whisker = vec![(middle, bar.least), (middle, bar.most)];
                area.draw(&PathElement::new(whisker, BLACK)).map_err(failed)?;
                let style = (FONT, 11).into_font().color(&BLACK);
                let style = style.pos(Pos::new(HPos::Center, VPos::Bottom));
                let top = (middle, bar.most.max(0.0));
                area.draw(&Text::new(short(bar.median), top, style)).map_err(failed)?;
            }
            let below = area.map_coordinate(&(group as f64 + 0.5, self.heights().start));
            let style = (FONT, 13).into_font().color(&BLACK);
            let style = style.pos(Pos::new(HPos::Center, VPos::Top));
            for (line, part) in (0..).zip(name.split(", ")) {
                let at = (below.0, below.1 + 6 + line * LINE as i32);
                root.draw_text(part, &style, at).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn draw_legend(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let failed = |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{error}");
        let mut x = 14;
        for (series, name) in self.series.iter().enumerate() {
            let colour = COLOURS[series % COLOURS.len()];
            let corners = [(x, 38), (x + 12, 50)];
            area.draw(&Rectangle::new(corners, colour.filled())).map_err(failed)?;
            let style = (FONT, 13).into_font().color(&GREY);
            area.draw_text(name, &style, (x + 17, 37)).map_err(failed)?;
            // Without the font at hand its width is an estimate.
            x += 32 + 7 * name.chars().count() as i32;
        }
        Ok(())
    }

    /// Lines of the longest name beyond the first: each comma begins one.
    fn extra_lines(&self) -> u32 {
        let lines = self.groups.iter().map(|(name, _)| name.matches(", ").count() as u32);
        lines.max().unwrap_or(0)
    }

    /// From the least to the most, zero included, with room for the figures.
    fn heights(&self) -> Range<f64> {
        let bars = || self.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
        let (least, most) = range(bars().flat_map(|bar| [bar.least, bar.most, 0.0]));
        let room = (most - least).max(1e-9) * 0.08;
        (if least < 0.0 { least - room } else { 0.0 })..most + room
    }

    /// Where a bar stands.
    fn places(&self, group: usize, series: usize) -> Range<f64> {
        let width = 0.8 / self.series.len().max(1) as f64;
        let start = group as f64 + 0.1 + width * series as f64;
        start..start + width * 0.92
    }
}

/// Three digits, thousands and millions by letter.
fn short(value: f64) -> String {
    let (scaled, letter) = match value.abs() {
        1e6.. => (value / 1e6, "M"),
        1e4.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    let text = format!("{scaled:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let of = |value| short(value);
        assert_eq!([of(0.0), of(1.25), of(99_108.0)], ["0", "1.25", "99.1k"]);
        assert_eq!([of(2_500_000.0), of(-0.1), of(100.0)], ["2.5M", "-0.1", "100"]);
    }

    #[test]
    fn a_plot_shows_each_group_and_series_and_leaves_gaps_out() {
        let bars = Bars {
            title: "Requests".into(),
            unit: "IOPS".into(),
            series: vec!["off".into(), "on".into()],
            groups: vec![
                ("depth 1".into(), vec![Some(Bar::of(&[1.0, 3.0, 2.0])), None]),
                ("depth 64".into(), vec![Some(Bar::of(&[4.0])), Some(Bar::of(&[-1.0]))]),
            ],
        };
        let file = std::env::temp_dir().join(format!("bench-plot-{}.svg", std::process::id()));
        bars.draw(&file).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        for word in ["Requests", "IOPS", "off", "depth 1", "depth 64"] {
            assert!(text.contains(word), "{word} is not in the plot");
        }
        // Background, two of the legend, three bars.
        assert_eq!(text.matches("<rect").count(), 6, "{text}");
    }
}

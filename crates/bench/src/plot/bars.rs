//! Vertical bars in groups.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Bar, COLOURS, FONT, HEADING, draw_heading, failed, short};
use crate::figures::range;

/// A plot of vertical bars in groups.
#[derive(Debug, Clone)]
pub(crate) struct Bars {
    /// The title.
    pub(crate) title: String,
    /// The meaning of the height, with its unit.
    pub(crate) unit: String,
    /// The names of the bars in each group.
    pub(crate) series: Vec<String>,
    /// The groups, with a bar (or none) per series.
    pub(crate) groups: Vec<(String, Vec<Option<Bar>>)>,
}

/// Size without further lines of the groups' names.
const SIZE: (u32, u32) = (900, 420);
/// Height of a line of the groups' names.
const LINE: u32 = 15;

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
        root.fill(&WHITE).map_err(failed)?;
        let (heading, body) = root.split_vertically(HEADING);
        draw_heading(&heading, &self.title, &self.series)?;
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

    /// Lines of the longest name beyond the first: each comma begins one.
    fn extra_lines(&self) -> u32 {
        let lines = self.groups.iter().map(|(name, _)| name.matches(", ").count() as u32);
        lines.max().unwrap_or(0)
    }

    /// The range of the values, zero included, with room for the figures.
    fn heights(&self) -> Range<f64> {
        let bars = || self.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
        let (least, most) = range(bars().flat_map(|bar| [bar.least, bar.most, 0.0]));
        let room = (most - least).max(1e-9) * 0.08;
        (if least < 0.0 { least - room } else { 0.0 })..most + room
    }

    /// The horizontal range of a bar.
    fn places(&self, group: usize, series: usize) -> Range<f64> {
        let width = 0.8 / self.series.len().max(1) as f64;
        let start = group as f64 + 0.1 + width * series as f64;
        start..start + width * 0.92
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
